"""Which engines are worth choosing from, and which one to take: words around ``evals.tradeoff``'s pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from evals.report import Row
from evals.tradeoff import frontier, recommend


def frontier_digests(rows: Sequence[Row], x: str, y: str) -> list[str]:
    """Digests of the engines that no other beats on both axes."""
    return [row.engine_digest for row in frontier(list(rows), x, y)]


def recommendation(rows: Sequence[Row]) -> str:
    """One sentence: which precision to take, and why."""
    return recommend(list(rows)).reason


def definitions() -> list[tuple[str, str, str]]:
    """(name, unit, formula) of every metric that a row shows."""
    return [(metric.name, metric.unit, metric.formula) for metric in METRICS.values()]
