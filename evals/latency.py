"""Latency and throughput of an engine over (batch, input length, output length), through its public ``generate``.

For one cell, every figure comes from wall-clock times of whole calls, nothing from inside the engine::

    T(1)     a batch of prompts, one new token each     TTFT: how long until every request has its first token
    T(n)     another such batch, n new tokens           e2e
    TPOT     (T(n) - T(1)) / (n - 1)                    the decode step, free of prefill
    out_tok_s = batch * n / T(n),   total_tok_s = batch * (isl + n) / T(n)

Each repeat measures T(1) and T(n) one after the other on fresh unique prompts (``workload``), end tokens are ignored,
and the lengths that came back are checked: a cell whose prompts or outputs had other lengths, or whose T(n) is not
above T(1), is kept and marked ``invalid``, never averaged away. Figures are medians over repeats; ``spread`` is max -
min. ``warmup`` calls come first and are thrown away (compilers, caches, clocks).

On a GPU each cell carries its state and the energy of a token (``gpu_state``), warm-up included; everywhere, how long
this process waited for a processor (``cpu_state``).

Cells are journalled as they finish: a killed sweep goes on with the next one.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from calib.artifact import canonical_json, sha256_hex
from calib.progress import Progress, Report, silent
from calib.text import Tokenizer
from engines.request import RequestOutput, SamplingParams
from evals.cpu_state import CpuWatch
from evals.errors import MeasureError
from evals.gpu_state import GpuWatch, cuda_uuid
from evals.journal import Journal
from evals.memory import measure_peak
from evals.records import save_record
from evals.report import Cell, LatencySweep, Target
from evals.workload import Prompts

Point = tuple[int, int, int]


class TimedGenerator(Protocol):
    """What a sweep needs: an ``engines.llm.LLM``."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]: ...


def sweep(llm: TimedGenerator | Callable[[], TimedGenerator], target: Target, grid: Sequence[Point], *, device: str,
          warmup: int = 1, repeats: int = 3, seed: int = 0, out: Path | str, engine: Path | None = None,
          max_batch_size: int | None = None, report: Report = silent, replace: bool = False) -> LatencySweep:
    """Measure every (batch_size, isl, osl) of ``grid`` and write the latency-sweep artifact at ``out``.

    ``llm`` is an open LLM, or a function that opens one (called only if a cell is still to be measured). With
    ``engine``, its folder, the memory peak is measured too, in a fresh process at the grid's most demanding point.
    MeasureError for an empty, doubled or impossible grid, or a batch above ``max_batch_size`` (the engine's own limit:
    it would be measured as a queue, not as a batch).
    """
    grid, out = [(int(b), int(i), int(o)) for b, i, o in grid], Path(out)
    _check_grid(grid, warmup, repeats, max_batch_size)
    key = sha256_hex(canonical_json([target.model_dump(mode="json"), device, warmup, repeats, seed]))
    work = out.absolute().with_name(f".{out.name}.work")
    with Journal(work / "cells.jsonl", key) as journal:
        waiting = [point for point in grid if _name(point) not in journal.done]
        if waiting:
            _measure(llm() if callable(llm) else llm, waiting, len(grid), journal, warmup, repeats, seed, report,
                     cuda_uuid() if target.numerics.startswith("cuda") else None)
        report(Progress("latency", len(grid), len(grid), "cell"))
        if engine is not None and "memory" not in journal.done:
            heaviest = max(grid, key=lambda point: point[0] * (point[1] + point[2]))
            journal.add({"memory": measure_peak(engine, *heaviest, seed=seed)})
        cells = [Cell.model_validate(journal.done[_name(point)]) for point in grid]
        record = LatencySweep(target=target, device=device, cells=cells, warmup=warmup, repeats=repeats, seed=seed,
                              peak_memory_bytes=journal.done.get("memory"))
    save_record(record, out, [target.digest], replace=replace)
    shutil.rmtree(work)
    return record


def _check_grid(grid: Sequence[Point], warmup: int, repeats: int, max_batch_size: int | None) -> None:
    bad = [point for point in grid if min(point) < 1]
    if not grid or bad or len(set(grid)) < len(grid):
        raise MeasureError(f"grid {list(grid)} is {'empty' if not grid else 'doubled or not positive'}",
                           "Give distinct (batch, input length, output length), each at least 1.")
    widest = max(batch for batch, _, _ in grid)
    if max_batch_size is not None and widest > max_batch_size:
        raise MeasureError(f"batch {widest} is above the engine's max_batch_size {max_batch_size}",
                           "Measure smaller batches, or build the engine with a larger limit.")
    if warmup < 0 or repeats < 1:
        raise MeasureError(f"{warmup} warm-up and {repeats} repeats cannot be measured", "Give at least one repeat.")


def _name(point: Point) -> str:
    return "batch={} isl={} osl={}".format(*point)


def _measure(llm: TimedGenerator, waiting: Sequence[Point], total: int, journal: Journal, warmup: int, repeats: int,
             seed: int, report: Report, gpu: str | None) -> None:
    prompts = Prompts(llm.tokenizer, seed)
    for number, point in enumerate(waiting, total - len(waiting)):
        report(Progress("latency", number, total, "cell", _name(point)))
        with GpuWatch(gpu) as watch, CpuWatch() as processors:
            cell = measure_cell(llm, prompts, point, warmup=warmup, repeats=repeats)
        cell = cell.model_copy(update={"waited": processors.waited})
        state = watch.seen((warmup + repeats) * point[0] * (point[2] + (1 if point[2] > 1 else 0)))
        if state is not None:
            cell = cell.model_copy(update={"gpu": state, "invalid": cell.invalid or state.invalid})
        journal.add({_name(point): cell.model_dump(mode="json")})


def measure_cell(llm: TimedGenerator, prompts: Prompts, point: Point, *, warmup: int, repeats: int) -> Cell:
    """One cell; see the module's formulas."""
    batch, isl, osl = point
    first: list[float] = []
    whole: list[float] = []
    faults: list[str] = []
    for repeat in range(-warmup, repeats):
        times = []
        for length in (1, osl) if osl > 1 else (1,):
            asked = prompts.batch(batch, isl, f"{_name(point)} repeat={repeat} length={length}")
            seconds, outputs = timed(llm, asked, length)
            faults += _length_faults(outputs, asked, length)
            times.append(seconds)
        if repeat >= 0:
            first.append(times[0])
            whole.append(times[-1])
    return _cell(point, first, whole, faults)


def timed(llm: TimedGenerator, prompts: list[list[int]], length: int) -> tuple[float, list[RequestOutput]]:
    """(seconds, outputs) of one call that makes exactly ``length`` tokens for every prompt."""
    params = SamplingParams(max_tokens=length, min_tokens=length, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return time.perf_counter() - begin, outputs


def _length_faults(outputs: Sequence[RequestOutput], asked: Sequence[Sequence[int]], length: int) -> list[str]:
    if len(outputs) != len(asked):
        return [f"{len(asked)} requests gave {len(outputs)} outputs"]
    faults = []
    for output, prompt in zip(outputs, asked, strict=True):
        if len(output.prompt_token_ids) != len(prompt):
            faults.append(f"an input of {len(prompt)} tokens became {len(output.prompt_token_ids)}")
        if len(output.outputs[0].token_ids) != length:
            faults.append(f"{length} output tokens were asked for and {len(output.outputs[0].token_ids)} came")
    return faults


def _cell(point: Point, first: Sequence[float], whole: Sequence[float], faults: Sequence[str]) -> Cell:
    batch, isl, osl = point
    steps = [(t_n - t_1) / (osl - 1) for t_1, t_n in zip(first, whole, strict=True)] if osl > 1 else []
    invalid = faults[0] if faults else None
    if not invalid and steps and min(steps) <= 0:
        invalid = f"{osl} tokens took no longer than one: {1000 * min(steps):.3g} ms a step"
    end = statistics.median(whole)
    return Cell(batch_size=batch, isl=isl, osl=osl, n=len(first), invalid=invalid,
                ttft_ms=1000 * statistics.median(first), ttft_ms_spread=1000 * (max(first) - min(first)),
                tpot_ms=1000 * statistics.median(steps) if steps else None,
                tpot_ms_spread=1000 * (max(steps) - min(steps)) if steps else None,
                e2e_ms=1000 * end, out_tok_s=batch * osl / end, total_tok_s=batch * (isl + osl) / end)
