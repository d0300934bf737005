"""From artifacts to a Row: one engine, what it costs in accuracy and what it buys in speed, side by side.

A figure that was not measured stays None. The headline cell is the job's; an invalid cell gives no headline figures.
"""

from __future__ import annotations

from typing import Protocol

from calib.scheme import Grid
from evals.report import Cell, EvalReport, LatencySweep, Row, Verdict

_KV = {"bf16": "bf16", "fp8_e4m3": "fp8", "int8": "int8"}


class EngineFacts(Protocol):
    """What a row needs to know of an engine; ``engines.engine.Engine`` has it."""

    @property
    def digest(self) -> str: ...
    @property
    def checkpoint_digest(self) -> str: ...
    @property
    def recipe(self) -> str: ...
    @property
    def kv(self) -> Grid: ...
    @property
    def device(self) -> str: ...
    @property
    def emulated(self) -> bool: ...
    @property
    def source_grid(self) -> str | None: ...
    @property
    def size_bytes(self) -> int: ...


def headline_cell(sweep: LatencySweep | None, wanted: tuple[int, int, int] | None) -> Cell | None:
    """The cell (batch, isl, osl) that a row's figures are taken from: the one asked for, else the first valid one."""
    cells = [cell for cell in sweep.cells if cell.invalid is None] if sweep else []
    for cell in cells:
        if wanted is None or (cell.batch_size, cell.isl, cell.osl) == wanted:
            return cell
    return None


def make_row(engine: EngineFacts, report: EvalReport | None, sweep: LatencySweep | None, verdict: Verdict | None,
             headline: tuple[int, int, int] | None = None) -> Row:
    """The row of one engine."""
    cell = headline_cell(sweep, headline)
    return Row(
        recipe=engine.recipe, kv_cache=_KV[engine.kv.dtype], device=engine.device, emulated=engine.emulated,
        engine_digest=engine.digest, checkpoint_digest=engine.checkpoint_digest, source_grid=engine.source_grid,
        size_bytes=engine.size_bytes,
        accuracy=report.accuracy if report else None, delta_nll=report.delta_nll if report else None,
        kl_mean=report.kl_mean if report else None, same_top1=report.same_top1 if report else None,
        flips=report.flips if report else None,
        ttft_ms=cell.ttft_ms if cell else None, tpot_ms=cell.tpot_ms if cell else None,
        out_tok_s=cell.out_tok_s if cell else None, batch_size=cell.batch_size if cell else None,
        isl=cell.isl if cell else None, osl=cell.osl if cell else None,
        peak_memory_bytes=sweep.peak_memory_bytes if sweep else None,
        verdict=verdict.word if verdict else None, verdict_reason=verdict.reason if verdict else None,
        cells=sweep.cells if sweep else [])
