"""What keeps a wrong kernel from winning: results are compared before times."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_checkpoint import FP8, INT8

from calib.scheme import BF16, Grid, PerGroup, Scheme
from engines.build.bench_gpu import Bench, difference, twin_rows
from engines.build.gpu_linears import impl_for, shape_of
from engines.device import detect
from engines.errors import EngineError
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


Spoil = Callable[[torch.Tensor], torch.Tensor]


def raced(spoils: list[Spoil], tokens: int, monkeypatch: pytest.MonkeyPatch, *, memory: bool = True) -> list[int]:
    """Which of several kernels are kept, when each gives the twin's results but for what ``spoils`` makes of them.
    Everything is as on a card but launching and taking times."""
    op = Linear(x="x", parts=("a",), rows=(96,), k=128, out="y", weight=INT8.weight, activation=INT8.activation)
    impl, seed = impl_for(op), torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, (tokens + op.n, op.k), generator=seed, dtype=torch.int8)
    scale = torch.rand(tokens + op.n, generator=seed) + 0.5
    packed, x, x_scale = impl.pack(codes[tokens:], scale[tokens:]), codes[:tokens], scale[:tokens]
    right = impl.twin(x, packed, x_scale=x_scale)
    subject = SimpleNamespace(op=op, impl=impl, packed=[packed], silu=None, forget=lambda tokens: None,
                              rows=lambda tokens: (x, x_scale, torch.empty(tokens, op.n)))
    if not memory:
        def twin(*_: Any, **__: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("no memory")
        monkeypatch.setattr(type(impl), "twin", twin)
    bench = Bench.__new__(Bench)
    monkeypatch.setattr(Bench, "_subject", lambda self, op: subject)
    monkeypatch.setattr(Bench, "_launch", lambda self, its, copy, m, config: spoils[config["I"]](right.clone()))
    monkeypatch.setattr(Bench, "_timed", lambda self, its, m, config: lambda copy: None)
    monkeypatch.setattr(Bench, "_median", lambda self, run, replays, graphed=True: 1e-6)
    bench._device = SimpleNamespace(name="nothing")  # type: ignore[assignment]
    found, dropped = bench.race(op, tokens, [KernelConfig.of("k", I=index) for index in range(len(spoils))])
    assert len(found) + dropped == len(spoils)
    return sorted(config["I"] for config, _ in found)


def fine(rows: torch.Tensor) -> torch.Tensor:
    return rows.bfloat16().float()


def row_off(rows: torch.Tensor) -> torch.Tensor:
    rows[1] *= 2
    return rows


def row_missing(rows: torch.Tensor) -> torch.Tensor:
    rows[1] = float("nan")
    return rows


@pytest.mark.parametrize("tokens", [2, 64, 256, 1000])
@pytest.mark.parametrize("wrong", [row_off, row_missing, torch.zeros_like, lambda rows: rows * 1.5])
def test_wrong_results_are_dropped_wherever_they_stand(tokens: int, wrong: Spoil, monkeypatch: pytest.MonkeyPatch
                                                       ) -> None:
    assert raced([fine, wrong, fine], tokens, monkeypatch) == [0, 2]
    if tokens <= 256 or wrong is not row_off:  # of many rows the twin makes some, and row 1 is none of those
        assert raced([wrong, fine, fine], tokens, monkeypatch) == [1, 2]
        with pytest.raises(EngineError, match="no kernel runs"):
            raced([wrong], tokens, monkeypatch)


def test_without_memory_for_the_twin_what_is_written_first_is_the_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert raced([row_missing, fine, row_off, fine], 64, monkeypatch, memory=False) == [1, 3]


def test_rows_for_the_twin() -> None:
    assert twin_rows(1) == [0]
    assert twin_rows(256) == list(range(256))
    for tokens in (257, 1000, 16384):
        found = twin_rows(tokens)
        assert {0, 63, 64, 127, 128, 255, 256, tokens - 1} <= {*found} <= {*range(tokens)}
        assert len(found) < 300
        assert all(any(first <= row < first + 128 for row in found) for first in range(0, tokens, 128))


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
