"""What a sweep of endpoints prints: every load once, the targets side by side under it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from evals.loads import EndpointCell
from evals.report import Cell, LatencySweep
from toolkit.report import words

if TYPE_CHECKING:
    from evals.load_plan import LoadPlan

_NUMBERS = ("TTFT ms", "± range", "TPOT ms", "± range ", "out tok/s", "req/s", "goodput", "in", "out", "cached")


def side_by_side(plan: LoadPlan, sweeps: Sequence[LatencySweep]) -> list[RenderableType]:
    """One block a load: its targets' medians with their range over repeats, and the achieved lengths."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in ("load", "target", *_NUMBERS, ""):
        table.add_column(name, justify="right" if name in _NUMBERS else "left", overflow="fold")
    for number, point in enumerate(plan.points()):
        for first, sweep in enumerate(sweeps):
            table.add_row(Text(point.name if first == 0 else ""), Text(sweep.target.name),
                          *_figures(sweep.cells[number]), end_section=first == len(sweeps) - 1)
    lag = max((run.client_lag_ms for sweep in sweeps for run in sweep.loads), default=0.0)
    late = max((run.lateness_ms or 0.0 for sweep in sweeps for run in sweep.loads), default=0.0)
    return [table, Text(f"client: held up by {lag:.1f} ms (99 % of the time less), sent {late:.1f} ms late at most",
                        style="dim")]


def _figures(cell: Cell) -> list[str | Text]:
    return [words.milliseconds(cell.ttft_ms), words.milliseconds(cell.ttft_ms_spread), words.number(cell.tpot_ms, 2),
            words.number(cell.tpot_ms_spread, 2), words.rate(cell.out_tok_s), words.number(cell.req_s, 2),
            words.number(cell.goodput_req_s, 2), *words.lengths(cell), words.percent(cell.cached_share),
            Text(f"invalid: {cell.invalid}" if cell.invalid else "", style="red")]


def plan_table(plan: LoadPlan) -> list[RenderableType]:
    """The dry run: what would be sent, and to whom."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in ("load", "target", "runs", "requests"):
        table.add_column(name)
    total = 0
    for point in plan.points():
        for target in plan.targets:
            count = None if point.requests is None else point.requests * plan.repeats
            total += count or 0
            table.add_row(Text(point.name), Text(f"{target.name} ({target.url})"), f"{plan.repeats}",
                          "as in the trace" if count is None else f"{count}")
    return [table, f"{total} requests and what the traces hold; nothing was sent"]


def search_parts(rate: float | None, tried: Sequence[tuple[float, EndpointCell]]) -> list[RenderableType]:
    """The highest rate that keeps the objectives, and every rate that was tried."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in ("requests/s", "good", "TTFT p90", "TPOT p90", ""):
        table.add_column(name, justify="right" if name else "left")
    for offered, cell in tried:
        table.add_row(f"{offered:.3g}", words.percent(cell.good_share), words.milliseconds(cell.ttft_ms.p90),
                      words.number(cell.tpot_ms.p90, 2), Text(cell.invalid or "", style="red"))
    found = "no rate in the range keeps the objectives" if rate is None else (
        f"highest rate that keeps the objectives: {rate:.3g} requests/s")
    return [table, Text(found, style="bold")]
