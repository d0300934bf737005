"""Which engines are worth choosing from, and which one to take: words around ``evals.tradeoff``'s pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evals.metric import METRICS
from evals.report import Estimate, Row
from evals.tradeoff import Constraints, State, classify, label, recommend
from toolkit.report import words
from toolkit.report.axes import Axis

#: What a row of the table shows, in the order in which it is explained below a report.
_SHOWN = ("delta_nll", "kl_mean", "same_top1", "accuracy", "flips", "ttft_ms", "tpot_ms", "out_tok_s", "size_bytes",
          "peak_memory_bytes")
STATES = {"frontier": "on the frontier", "tied": "tied", "dominated": "dominated", "unmeasured": "not measured"}


@dataclass(frozen=True, slots=True)
class Standing:
    """Where an engine stands between two axes, with the words for it."""

    state: State
    words: str


@dataclass(frozen=True, slots=True)
class Decision:
    """``engine``: the recommended engine's digest, or None; ``rejected``: why the others are out, by digest."""

    engine: str | None
    sentence: str
    rejected: dict[str, str]


def standings(rows: Sequence[Row], x: Axis, y: Axis) -> dict[str, Standing]:
    """By engine digest. Empty where a figure has no direction: then nothing dominates anything."""
    if not (x.directed and y.directed):
        return {}
    found = {}
    for point in classify(rows, x.ranked_by, y.ranked_by):
        by = label(rows[point.by]) if point.by is not None else ""
        found[rows[point.index].engine_digest] = Standing(point.state, {
            "frontier": "on the frontier", "tied": f"tied: cannot be told apart from {by}",
            "dominated": f"dominated: beaten by {by}", "unmeasured": "not measured"}[point.state])
    return found


def decide(rows: Sequence[Row], constraints: Constraints, losses: Mapping[str, Estimate] | None = None,
           max_loss: float | None = None) -> Decision:
    """The engine to take, in a sentence.

    ``losses``: paired loss of accuracy by engine digest; ``max_loss``: the most that may be lost, as a share. An engine
    whose paired loss is above it by the point estimate is out; its interval is said, since it often reaches further.
    """
    barred = _barred(rows, losses or {}, max_loss)
    kept = [row for row in rows if row.engine_digest not in barred]
    found = recommend(kept, constraints)
    rejected = {kept[index].engine_digest: why for index, why in found.rejected.items()} | barred
    sentence = found.reason if kept else "No engine meets the constraints."
    if barred:
        names = "; ".join(f"{label(row)}: {barred[row.engine_digest]}" for row in rows if row.engine_digest in barred)
        sentence += f" Left out before: {names}."
    return Decision(kept[found.index].engine_digest if found.index is not None else None, sentence, rejected)


def _barred(rows: Sequence[Row], losses: Mapping[str, Estimate], max_loss: float | None) -> dict[str, str]:
    if max_loss is None:
        return {}
    found = {}
    for row in rows:
        loss = losses.get(row.engine_digest)
        if row.verdict == "BASELINE":
            continue
        if loss is None:
            found[row.engine_digest] = "its answers were not compared with the baseline's"
        elif loss.value > max_loss + 1e-12:
            found[row.engine_digest] = (
                f"it lost {words.points(loss)} points of accuracy, {words.number(100 * max_loss, 1)} allowed")
    return found


def recommendation(rows: Sequence[Row], constraints: Constraints | None = None) -> str:
    """One sentence: which precision to take, and why."""
    return recommend(rows, constraints).reason


def definitions() -> list[tuple[str, str, str]]:
    """(title, unit, formula) of every figure of a row."""
    return [(METRICS[name].title, METRICS[name].unit, METRICS[name].formula) for name in _SHOWN]
