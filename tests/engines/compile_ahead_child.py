"""Child of test_gpu_parts: compile one variant for sm_90 without a GPU and see whether a launch would find it."""

from __future__ import annotations

import contextlib
import json

import torch
import triton

from engines.kernels import prepare
from engines.kernels.compile_ahead import _Target, collect, compile_variants


class Target(_Target):
    """Triton asks a driver for the stream before a launch."""

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def launch() -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    prepare.launch(zeros(prepare.FIELDS, 32), zeros(32), zeros(64), zeros(32), zeros(32), zeros(4, 32), zeros(16),
                   zeros(16), zeros(16), zeros(4), zeros(4, 32), block_size=16, pdl=True)


def main() -> None:
    triton.runtime.driver.set_active(Target(90))  # type: ignore[arg-type]
    with collect() as variants:
        launch()
    failed = compile_variants(list(variants.values()), 90, 1)
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
    with contextlib.suppress(AttributeError):  # there is no launcher without a GPU
        launch()
    before = len(list(variants))
    again = compile_variants(list(variants.values()), 90, 1)
    print(json.dumps({"collected": before, "failed": list(failed), "cache_hits": hits, "again": len(again)}))


if __name__ == "__main__":
    main()
