"""Which engines are worth choosing from, and which one to take: words around ``evals.tradeoff``'s pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evals.metric import METRICS
from evals.report import Row
from evals.tradeoff import Constraints, State, classify, label, recommend
from toolkit.report.axes import Axis

#: What a row of the table shows, in the order in which it is explained below a report.
_SHOWN = ("delta_nll", "kl_mean", "same_top1", "accuracy", "flips", "ttft_ms", "tpot_ms", "out_tok_s", "size_bytes",
          "peak_memory_bytes")


@dataclass(frozen=True, slots=True)
class Standing:
    """Where an engine stands between two axes, with the words for it."""

    state: State
    words: str


def standings(rows: Sequence[Row], x: Axis, y: Axis) -> dict[str, Standing]:
    """By engine digest. Empty where a figure has no direction: then nothing dominates anything."""
    if not (x.directed and y.directed):
        return {}
    found = {}
    for point in classify(rows, x.key, y.key):
        by = label(rows[point.by]) if point.by is not None else ""
        found[rows[point.index].engine_digest] = Standing(point.state, {
            "frontier": "on the frontier", "tied": f"cannot be told apart from {by}", "dominated": f"beaten by {by}",
            "unmeasured": "not measured"}[point.state])
    return found


def recommendation(rows: Sequence[Row], constraints: Constraints | None = None) -> str:
    """One sentence: which precision to take, and why."""
    return recommend(rows, constraints).reason


def definitions() -> list[tuple[str, str, str]]:
    """(title, unit, formula) of every figure of a row."""
    return [(METRICS[name].title, METRICS[name].unit, METRICS[name].formula) for name in _SHOWN]
