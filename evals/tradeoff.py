"""Which engine to take: a frontier that knows its own uncertainty, and constraints that end in one sentence.

A frontier drawn through point estimates crowns whoever was lucky. Each figure here is an interval: quality with its
confidence interval, speed with its spread over repeats (a figure without either is a point). With "better" meaning
lower or higher as the metric says, a row is

    dominated   some other row is no worse in both figures even at its worst against this one's best, and better in one
    frontier    no other row is as good in both by the point estimates and better in one
    tied        neither: beaten on paper, by less than the figures can tell apart

Intervals of two engines against one baseline are positively correlated, so "dominated" is said too rarely, never too
often. Pure functions over rows; a figure that was not measured takes its row out, with the reason.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field

from calib.errors import UnknownNameError
from calib.scheme import Frozen
from evals.metric import METRICS, Metric
from evals.report import Cell, Estimate, Row

State = Literal["frontier", "tied", "dominated", "unmeasured"]

_CELL_SPREAD = {"ttft_ms": "ttft_ms_spread", "tpot_ms": "tpot_ms_spread"}
_ROW_FIGURES = ("accuracy", "delta_nll", "kl_mean", "same_top1", "flips", "ttft_ms", "tpot_ms", "out_tok_s",
                "peak_memory_bytes", "size_bytes", "joules_per_token")


class Figure(Frozen):
    """A value with the interval it may lie in."""

    value: float
    low: float
    high: float


class Point(Frozen):
    """One row on a frontier; ``index`` into the rows given; ``by`` the row that beats it, clearly or on paper."""

    index: int
    x: Figure | None
    y: Figure | None
    state: State
    by: int | None = None


class Constraints(Frozen):
    """What an engine must meet. Loss counts with the upper end of its interval, accuracy with the lower end.

    Among those that meet everything the one best in ``prefer`` is recommended.
    """

    max_delta_nll: float | None = None
    min_accuracy: float | None = Field(default=None, ge=0, le=1)
    max_ttft_ms: float | None = Field(default=None, gt=0)
    max_tpot_ms: float | None = Field(default=None, gt=0)
    min_out_tok_s: float | None = Field(default=None, gt=0)
    max_peak_memory_bytes: float | None = Field(default=None, gt=0)
    max_size_bytes: float | None = Field(default=None, gt=0)
    passed_gate: bool = True
    prefer: Literal["tpot_ms", "ttft_ms", "out_tok_s", "peak_memory_bytes", "size_bytes", "delta_nll",
                    "accuracy"] = "tpot_ms"


class Recommendation(Frozen):
    """``index`` of the recommended row, or None; ``reason`` one sentence for a person; ``rejected`` why, by index."""

    index: int | None
    reason: str
    rejected: dict[int, str]


def figure_of(row: Row, name: str) -> Figure | None:
    """A row's figure with its interval; None when it was not measured. UnknownNameError for a name that rows lack.

    The baseline's own loss is 0 by definition.
    """
    if name not in _ROW_FIGURES:
        raise UnknownNameError("figure of a row", name, _ROW_FIGURES)
    value = _joules(row) if name == "joules_per_token" else getattr(row, name)
    if value is None:
        own = name == "delta_nll" and row.verdict == "BASELINE"
        return Figure(value=0.0, low=0.0, high=0.0) if own else None
    if isinstance(value, Estimate):
        return Figure(value=value.value, low=value.ci_low, high=value.ci_high)
    cell = _headline(row)
    half = (getattr(cell, _CELL_SPREAD[name]) or 0.0) / 2 if cell and name in _CELL_SPREAD else 0.0
    return Figure(value=value, low=value - half, high=value + half)


def _headline(row: Row) -> Cell | None:
    """The cell that a row's own figures were taken from."""
    place = (row.batch_size, row.isl, row.osl)
    return next((cell for cell in row.cells if (cell.batch_size, cell.isl, cell.osl) == place), None)


def _joules(row: Row) -> float | None:
    """Energy of an output token in the headline cell; None where no counter was read."""
    cell = _headline(row)
    return cell.gpu.joules_per_token if cell and cell.gpu else None


def label(row: Row) -> str:
    return row.recipe if row.kv_cache == "bf16" else f"{row.recipe} kv={row.kv_cache}"


def _cost(figure: Figure, metric: Metric) -> Figure:
    """The same figure with lower always better."""
    if metric.better == "lower":
        return figure
    return Figure(value=-figure.value, low=-figure.high, high=-figure.low)


def frontier(rows: Sequence[Row], x: str = "tpot_ms", y: str = "delta_nll") -> list[Row]:
    """The rows on the frontier, from the lowest ``x`` to the highest (a line through them is the frontier)."""
    on_it = [point for point in classify(rows, x, y) if point.state == "frontier" and point.x is not None]
    return [rows[point.index] for point in sorted(on_it, key=lambda point: point.x.value if point.x else 0.0)]


def classify(rows: Sequence[Row], x: str = "tpot_ms", y: str = "delta_nll") -> list[Point]:
    """One Point a row, in order. Figures without a direction (KL, flips) have no frontier: UnknownNameError."""
    for name in (x, y):
        if name in METRICS and METRICS[name].better == "none":
            raise UnknownNameError("figure with a direction", name,
                                   [n for n in _ROW_FIGURES if METRICS[n].better != "none"])
    figures = [(figure_of(row, x), figure_of(row, y)) for row in rows]
    costs = {i: (_cost(a, METRICS[x]), _cost(b, METRICS[y])) for i, (a, b) in enumerate(figures) if a and b}
    points = []
    for i, (a, b) in enumerate(figures):
        state, by = _state(i, costs) if i in costs else ("unmeasured", None)
        points.append(Point(index=i, x=a, y=b, state=state, by=by))
    return points


def _state(i: int, costs: dict[int, tuple[Figure, Figure]]) -> tuple[State, int | None]:
    mine = costs[i]
    on_paper: int | None = None
    for j, other in costs.items():
        if j == i:
            continue
        if _beats([figure.high for figure in other], [figure.low for figure in mine]):
            return "dominated", j
        if on_paper is None and _beats([figure.value for figure in other], [figure.value for figure in mine]):
            on_paper = j
    return ("tied", on_paper) if on_paper is not None else ("frontier", None)


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return (all(a <= b for a, b in zip(one, other, strict=True))
            and any(a < b for a, b in zip(one, other, strict=True)))


_Check = tuple[str, str, Callable[[float, float], bool], Literal["value", "low", "high"], str]
_CHECKS: tuple[_Check, ...] = (
    ("max_delta_nll", "delta_nll", operator.le, "high", "the interval of its ΔNLL reaches {found:+.4f}, above "
     "{limit:g}"),
    ("min_accuracy", "accuracy", operator.ge, "low", "the interval of its accuracy reaches down to {found:.3f}, below "
     "{limit:g}"),
    ("max_ttft_ms", "ttft_ms", operator.le, "value", "TTFT {found:.4g} ms is above {limit:g}"),
    ("max_tpot_ms", "tpot_ms", operator.le, "value", "TPOT {found:.4g} ms is above {limit:g}"),
    ("min_out_tok_s", "out_tok_s", operator.ge, "value", "{found:.4g} output tokens/s are below {limit:g}"),
    ("max_peak_memory_bytes", "peak_memory_bytes", operator.le, "value", "{found:.4g} bytes of memory are above "
     "{limit:g}"),
    ("max_size_bytes", "size_bytes", operator.le, "value", "{found:.4g} bytes of files are above {limit:g}"),
)


def _objection(row: Row, constraints: Constraints) -> str | None:
    """Why a row does not meet the constraints, the first reason; None when it does."""
    if constraints.passed_gate and row.verdict not in ("PASS", "BASELINE"):
        return f"its verdict is {row.verdict or 'missing'}"
    for field, name, holds, side, words in _CHECKS:
        limit = getattr(constraints, field)
        if limit is None:
            continue
        figure = figure_of(row, name)
        if figure is None:
            return f"its {METRICS[name].title} was not measured"
        found = getattr(figure, side)
        if not holds(found, limit):
            return words.format(found=found, limit=limit)
    if figure_of(row, constraints.prefer) is None:
        return f"its {METRICS[constraints.prefer].title} was not measured"
    return None


def recommend(rows: Sequence[Row], constraints: Constraints | None = None) -> Recommendation:
    """The best row that meets the constraints, with the reason in one sentence."""
    constraints = constraints or Constraints()
    metric = METRICS[constraints.prefer]
    rejected = {i: why for i, row in enumerate(rows) if (why := _objection(row, constraints)) is not None}
    able = [i for i in range(len(rows)) if i not in rejected]
    if not able:
        listed = "; ".join(f"{label(rows[i])}: {why}" for i, why in rejected.items()) or "there are no rows"
        return Recommendation(index=None, rejected=rejected, reason=f"No engine meets the constraints ({listed}).")
    figures = {i: figure for i in able if (figure := figure_of(rows[i], metric.name)) is not None}
    costs = {i: _cost(figure, metric) for i, figure in figures.items()}
    best = min(costs, key=lambda i: costs[i].value)
    close = [label(rows[i]) for i in costs if i != best and costs[i].low <= costs[best].high]
    reason = (f"{label(rows[best])} has the best {metric.title} ({figures[best].value:.4g} {metric.unit}) of the "
              f"{len(able)} of {len(rows)} engines that meet every constraint")
    reason += f", though {' and '.join(close)} cannot be told apart from it." if close else "."
    return Recommendation(index=best, rejected=rejected, reason=reason)
