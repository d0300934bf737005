"""Cells under service levels: which loads meet them, and the most that an engine gives while it does.

In batch mode all requests of a cell share its times, so the cell meets the objectives as a whole: its goodput is
batch / (end-to-end time) requests a second, or nothing. An endpoint's cells carry their own goodput where objectives
were given when they were measured; with others, a cell counts when its medians meet them, and the table says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from evals.loads import EndpointCell, Objectives, Spread
from evals.report import Cell, LatencySweep, Row
from evals.tradeoff import label


@dataclass(frozen=True, slots=True)
class Served:
    """The best of one engine's cells within the objectives; ``met`` of ``cells`` are."""

    name: str
    met: int
    cells: int
    best: Cell | None
    goodput_req_s: float | None
    measured: bool


def within(cells: Sequence[Cell], objectives: Objectives) -> list[Cell]:
    """The valid cells whose figures meet every objective."""
    return [cell for cell in cells if cell.invalid is None and cell.ttft_ms is not None and cell.e2e_ms is not None
            and objectives.met(cell.ttft_ms, cell.tpot_ms, cell.e2e_ms)]


def request_rate(cell: Cell) -> float | None:
    """Requests a second: as measured, else the batch over its end-to-end time."""
    if cell.req_s is not None:
        return cell.req_s
    return cell.batch_size / cell.e2e_ms * 1000 if cell.e2e_ms else None


def served(rows: Sequence[Row], endpoints: Sequence[LatencySweep], objectives: Objectives) -> list[Served]:
    """One line per engine and endpoint, the highest goodput first."""
    named = [(label(row), row.cells) for row in rows] + [(sweep.target.name, sweep.cells) for sweep in endpoints]
    found = []
    for name, cells in named:
        good = within(cells, objectives)
        best = max(good, key=lambda cell: request_rate(cell) or 0.0, default=None)
        found.append(Served(name, len(good), len([cell for cell in cells if cell.invalid is None]), best,
                            request_rate(best) if best else None, bool(best and best.mode == "batch")))
    return sorted(found, key=lambda line: -(line.goodput_req_s or 0.0))


def told_apart(sweeps: Sequence[LatencySweep]) -> list[LatencySweep]:
    """The newest sweep of each target (they come newest first), with names that differ: two servers may call their
    model alike."""
    found: dict[str, LatencySweep] = {}
    names: set[str] = set()
    for sweep in sweeps:
        target = sweep.target
        if target.digest in found:
            continue
        name = target.name if target.name not in names else f"{target.name} ({target.digest[:6]})"
        names.add(name)
        found[target.digest] = sweep.model_copy(update={"target": target.model_copy(update={"name": name})})
    return list(found.values())


PARTS = ("p50", "p90", "p99")


def by_load(sweep: LatencySweep, figure: str) -> list[tuple[str, dict[str, float | None]]]:
    """(load, {p50, p90, p99}) of ``ttft_ms`` or ``tpot_ms``, lightest load first; medians over the valid runs of it."""
    runs: dict[str, list[EndpointCell]] = {}
    for load in sorted(sweep.loads, key=lambda one: one.request_rate or one.concurrency or 0.0):
        if load.invalid is None:
            runs.setdefault(_load(load), []).append(load)
    return [(name, {part: _median([getattr(getattr(load, figure), part) for load in loads]) for part in PARTS})
            for name, loads in runs.items()]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def percentiles(endpoints: Sequence[LatencySweep]) -> list[dict[str, str | float | None]]:
    """Every run of every endpoint: p50, p90 and p99 of TTFT and TPOT over its requests."""
    lines = []
    for sweep in endpoints:
        for load in sweep.loads:
            lines.append({"endpoint": sweep.target.name, "load": _load(load), "requests": load.completed,
                          **_spread("TTFT", load.ttft_ms), **_spread("TPOT", load.tpot_ms),
                          "not valid because": load.invalid or ""})
    return lines


def _load(load: EndpointCell) -> str:
    if load.request_rate is not None:
        return f"{load.request_rate:g} req/s"
    return f"{load.concurrency:g} at a time" if load.concurrency is not None else "all at once"


def _spread(name: str, spread: Spread) -> dict[str, float | None]:
    return {f"{name} {part}": getattr(spread, part) for part in PARTS}
