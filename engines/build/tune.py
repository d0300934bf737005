"""Which operator runs each linear: timed on this machine, kept in a tuning cache.

The best CPU operator depends on the processor far more than on the model: with VNNI ``int_mm`` is the fastest int8
form, without it it is a reference loop 50 times slower than ``split``. So every operator that can run a linear of a
given shape is prepared on random codes and timed at the step sizes that matter (one token, a small batch, a prefill
chunk), over several copies of the weight in turn, so that it comes from memory as it does in a model, candidates
interleaved so
that a busy machine disturbs all alike, the best of several runs each. The choice
minimises the sum over step sizes of time / best time there, decode sizes counting double; *one* operator is chosen for
all step sizes, so that a row's operator never depends on its batch mates. A smaller layout wins ties within 3 %.

The compiled step (``kernels/cpu/native``) is one more candidate, ``tiles``, chosen for all linears of a program or for
none (``compiled_cpu.py``).

``tune`` none takes ``tiles`` where the program has a compiled form, else the first operator that can run the linear.
quick takes the same, and times ``tiles`` for the record; without a compiled form it times the operators. full times all
of them, each for longer, and decides by the times. A shape in the cache (``tuning_cache``) is never timed again,
which makes builds repeatable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

from calib.progress import Progress, Report
from calib.scheme import Frozen
from engines.build import compiled_cpu
from engines.build.impls import group_of
from engines.build.tuning_cache import TuningCache
from engines.device import Device
from engines.kernels.cpu.disk import Stored, pack, scale_shape
from engines.kernels.cpu.linear import LinearOperator, Rows, choices
from engines.kernels.cpu.native import operator
from engines.kernels.cpu.native.grids import NAME
from engines.kernels.cpu.rows import (
    quantize_fp8_static,
    quantize_fp8_token,
    quantize_int8_static,
    quantize_int8_token,
    round_groups,
)
from engines.plan import KernelChoice, linear_shape
from engines.program import Linear, Program

#: Tokens a step -> weight in the score.
STEPS: dict[int, float] = {1: 2.0, 8: 2.0, 64: 1.0}
SECONDS = {"quick": 0.06, "full": 0.6}
#: Copies of a weight that are timed in turn: enough to leave the caches, few enough to be made quickly.
_COLD_BYTES, _MOST_COPIES = 32 << 20, 12
_TIE = 1.03
_LOUD_EVERY, _LOUDNESS = 64, 8.0
_ORDER_OF_SIZE = (NAME, "int4pack", "split", "int_mm", "half", "float")


class Timing(Frozen):
    """Evidence: every candidate's best milliseconds by tokens a step.

    ``impl`` is the best one that is not ``tiles``, and ``tiles`` where nothing else was timed.
    """

    shape: str
    impl: str
    runner_up: str | None
    milliseconds: dict[str, dict[int, float]]


def _random_stored(op: Linear, seed: int) -> Stored:
    """A random weight on the op's grid."""
    generator = torch.Generator().manual_seed(seed)
    shape, grid = (op.n, op.k), op.weight
    if grid.dtype in ("bf16", "fp8_e4m3"):
        weight = torch.randn(shape, generator=generator).to(
            torch.bfloat16 if grid.dtype == "bf16" else torch.float8_e4m3fn)
    else:
        low, high = (-127, 128) if grid.dtype == "int8" else (-8, 8) if grid.symmetric else (0, 16)
        weight = torch.randint(low, high, shape, generator=generator, dtype=torch.int8)
    part = {"weight": weight}
    if grid.quantized:
        scales = scale_shape(grid, op.n, op.k)
        part["weight_scale"] = torch.rand(scales, generator=generator) * 0.01 + 0.01
        if not grid.symmetric:
            part["weight_zero"] = torch.zeros(scales, dtype=torch.int8)
        if op.order is not None:
            groups = torch.arange(op.k) // group_of(grid)
            part["g_idx"] = groups[torch.randperm(op.k, generator=generator)]
    return pack(grid, [part], [op.parts[0]])


def _rows(op: Linear, tokens: int) -> Rows:
    """Random rows with a few loud columns, as layers of a language model have them (``split`` is faster for it)."""
    x = torch.randn(tokens, op.k)
    x[:, ::_LOUD_EVERY] *= _LOUDNESS
    if op.activation is None:
        return x
    if (size := group_of(op.activation)) > 0:
        return round_groups(x, size, op.activation.dtype)
    if op.activation.dtype == "fp8_e4m3":
        return quantize_fp8_token(x) if op.activation.dynamic else quantize_fp8_static(x, _LOUDNESS / 100)
    return quantize_int8_token(x) if op.activation.dynamic else quantize_int8_static(x, _LOUDNESS / 30)


def _race(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Best milliseconds of each function, interleaved; a hopeless one (10 x the best of 3) is not timed further."""
    best = {name: min(_time(run) for _ in range(3)) for name, run in runs.items()}
    left = [name for name in runs if best[name] <= 10 * min(best.values())]
    end = time.perf_counter() + seconds * len(left)
    while time.perf_counter() < end:
        for name in left:
            best[name] = min(best[name], _time(runs[name]))
    return best


def _time(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def _choose(times: dict[str, dict[int, float]]) -> list[str]:
    """Operators, best first."""
    fastest = {step: min(row[step] for row in times.values()) for step in STEPS}
    score = {name: sum(weight * row[step] / fastest[step] for step, weight in STEPS.items())
             for name, row in times.items()}
    ranked = sorted(times, key=lambda name: score[name])
    tied = [name for name in ranked if score[name] <= _TIE * score[ranked[0]]]
    winner = min(tied, key=_ORDER_OF_SIZE.index)
    return [winner, *(name for name in ranked if name != winner)]


def time_linear(op: Linear, operators: Sequence[LinearOperator], seconds: float, compiled: bool = False) -> Timing:
    """Time every operator on a linear of this shape, and the compiled one beside them; choose among the operators."""
    stored = _random_stored(op, 0)
    copies = max(1, min(_MOST_COPIES, _COLD_BYTES // (op.n * op.k)))
    with torch.inference_mode():
        prepared = {each.name: _in_turn([each.prepare(stored) for _ in range(copies)]) for each in operators}
        if compiled:
            prepared[NAME] = operator.prepare(stored, op.activation, copies=copies)
        times: dict[str, dict[int, float]] = {name: {} for name in prepared}
        for step in STEPS:
            rows = _rows(op, step)
            runs = {name: _bound(run, rows) for name, run in prepared.items()}
            for name, milliseconds in _race(runs, seconds).items():
                times[name][step] = round(milliseconds / copies, 5)
    ranked = _choose({name: row for name, row in times.items() if name != NAME} or times)
    return Timing(shape=linear_shape(op), impl=ranked[0], runner_up=ranked[1] if len(ranked) > 1 else None,
                  milliseconds=times)


def _in_turn(runs: Sequence[Callable[[Rows], torch.Tensor]]) -> Callable[[Rows], torch.Tensor]:
    def run(rows: Rows) -> torch.Tensor:
        for one in runs:
            out = one(rows)
        return out
    return run


def _bound(run: Callable[[Rows], torch.Tensor], rows: Rows) -> Callable[[], object]:
    return lambda: run(rows)


def tune(program: Program, device: Device, mode: Literal["none", "quick", "full"], max_num_tokens: int,
         cache: Path | None, report: Report, deterministic: bool = False
         ) -> tuple[list[KernelChoice], list[Timing]]:
    """The choice for every distinct linear of a program, and the timings behind it (none for mode none).

    ``deterministic`` takes the compiled step, whatever its time. ``cache`` is the folder of tuning caches; entries for
    this device are used and new ones added.
    """
    distinct = {linear_shape(op): op for op in program.linears()}
    kept = TuningCache(None if mode == "none" else cache, "tuning", device, Timing)
    known = kept.read()
    compiled = compiled_cpu.refuses(program) is None
    picked: dict[str, str] = {}
    timings: list[Timing] = []
    for done, (shape, op) in enumerate(distinct.items()):
        report(Progress("tune", done, len(distinct), "shape", shape))
        operators = choices(op.weight, op.activation, op.n, op.k, op.order is not None)
        picked[shape] = NAME if compiled else operators[0].name
        if compiled and mode == "quick":
            operators = []
        if mode != "none":
            if not _answers(known.get(shape), operators, compiled):
                known[shape] = time_linear(op, operators, SECONDS[mode], compiled)
            if not compiled or mode == "full":
                picked[shape] = known[shape].impl
            timings.append(known[shape])
    report(Progress("tune", len(distinct), len(distinct), "shape"))
    kept.add({timing.shape: timing for timing in timings})
    if compiled and mode == "full" and (deterministic or compiled_cpu.faster(
            program, {timing.shape: timing.milliseconds for timing in timings}, picked, STEPS)):
        picked = dict.fromkeys(picked, NAME)
    return [KernelChoice(op="linear", shape=shape, max_tokens=max_num_tokens, impl=impl)
            for shape, impl in picked.items()], timings


def _answers(timing: Timing | None, operators: Sequence[LinearOperator], compiled: bool) -> bool:
    """Whether a cached timing decides this race."""
    return timing is not None and {each.name for each in operators} <= timing.milliseconds.keys() and (
        not compiled or NAME in timing.milliseconds)
