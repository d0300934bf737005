"""What keeps a wrong kernel from winning: results are compared before times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory_checkpoint import FP8, INT8

from calib.scheme import BF16, Grid, PerGroup, Scheme
from engines.build.bench_gpu import Bench, difference
from engines.build.gpu_linears import impl_for, shape_of
from engines.device import detect
from engines.kernels.impl import KernelConfig
from engines.program import Linear


def gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


def test_differences_of_rounding_pass_and_wrong_sums_do_not() -> None:
    wanted = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    assert difference(wanted.bfloat16().float(), wanted) < 0.5
    few = wanted.clone()
    few[3, 7] += 0.5 * wanted.abs().max()  # one of 32,768
    assert difference(few, wanted) > 1.0
    many = wanted * 1.02
    assert difference(many, wanted) > 1.0
    unwritten = wanted.clone()
    unwritten[0, 0] = float("nan")
    assert not difference(unwritten, wanted) <= 1.0


def linear(scheme: Scheme | None) -> Linear:
    return Linear(x="x", parts=("a",), rows=(4096,), k=4096, out="y", weight=BF16 if scheme is None else scheme.weight,
                  activation=None if scheme is None else scheme.activation)


W4 = Grid(dtype="int4", granularity=PerGroup(size=128))
SCHEMES = {"bf16": None, "int8": INT8, "fp8": FP8, "int8_weight": Scheme(weight=INT8.weight), "int4": Scheme(weight=W4),
           "int4_a8": Scheme(weight=W4, activation=Grid(dtype="int8", granularity=PerGroup(size=128), dynamic=True))}


@gpu
@pytest.mark.parametrize("name", SCHEMES)
def test_no_right_candidate_is_dropped(name: str) -> None:
    op, device = linear(SCHEMES[name]), detect("cuda")
    with torch.inference_mode():
        bench = Bench(device, {})
        for tokens in (1, 16, 200, 2048):
            wanted = list(impl_for(op).candidates(shape_of(op, tokens), device.facts))[:4]
            times, dropped = bench.race(op, tokens, wanted)
            assert not dropped, (tokens, {*wanted} - {config for config, _ in times})


@gpu
@pytest.mark.parametrize("tokens", [1, 64, 1024])
def test_a_wrong_first_candidate_does_not_set_the_measure(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of four gives something else: it is dropped, the others are timed."""
    op, device = linear(INT8), detect("cuda")
    impl = impl_for(op)
    first, *others = list(impl.candidates(shape_of(op, tokens), device.facts))[:4]
    launch = type(impl).launch

    def wrong(self: Any, x: torch.Tensor, packed: Any, config: KernelConfig, out: torch.Tensor, **rest: Any
              ) -> torch.Tensor:
        found = launch(self, x, packed, config, out, **rest)
        return found.mul_(1.5) if config == first else found

    monkeypatch.setattr(type(impl), "launch", wrong)
    with torch.inference_mode():
        times, dropped = Bench(device, {}).race(op, tokens, [first, *others])
    assert dropped == 1
    assert {config for config, _ in times} == {*others}
