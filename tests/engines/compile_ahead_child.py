"""Child of test_compile_ahead: compile one variant for sm_90 without a GPU and see whether a launch would find it; or,
with an argument, print the cache keys of all kernels, made in the order of their names or ``backwards``."""

from __future__ import annotations

import contextlib
import importlib
import json
import pkgutil
import sys

import torch
import triton

import engines.kernels
from engines.kernels import prepare
from engines.kernels.compile_ahead import _Target, collect, compile_variants, settle


class Target(_Target):
    """Triton asks a driver for the stream before a launch."""

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def launch() -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    prepare.launch(zeros(prepare.FIELDS, 32), zeros(32), zeros(64), zeros(32), zeros(32), zeros(4, 32), zeros(16),
                   zeros(16), zeros(16), zeros(4), zeros(4, 32), block_size=16, pdl=True)


def all_keys(order: str) -> dict[str, str]:
    found = {}
    for module in pkgutil.walk_packages(engines.kernels.__path__, "engines.kernels."):
        if ".cpu" not in module.name:
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, triton.runtime.jit.JITCallable):
                    found[f"{value.__module__}.{name}"] = value
    for value in list(found.values())[:3]:
        _ = value.cache_key  # as Triton makes it when nobody has settled it
    return {name: settle(found[name]) for name in sorted(found, reverse=order == "backwards")}


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(all_keys(sys.argv[1])))
        return
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
