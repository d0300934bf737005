"""Two to five runs side by side: what was different in how they were made, and each engine's figures in all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evals.report import Row
from evals.tradeoff import label
from toolkit.report import words
from toolkit.report.axes import COST, QUALITY, Axis
from toolkit.report.compare import Change, change
from toolkit.report.tables import record
from toolkit.store import Run

MOST = 5


@dataclass(frozen=True, slots=True)
class Figures:
    """One figure of one engine in every run; ``changes`` against the first run."""

    engine: str
    axis: Axis
    values: list[float | None]
    changes: list[Change | None]

    @property
    def seen(self) -> bool:
        """Whether any run differs from the first beyond the noise."""
        return any(change is not None and change.seen for change in self.changes)


def facts(runs: Sequence[Run]) -> list[dict[str, str]]:
    """The facts in which the runs differ, one line a fact (of several, such as versions, one line each), one column a
    run."""
    held = {run.id: _flat(run.facts) for run in runs}
    names = sorted({name for found in held.values() for name in found})
    return [{"fact": name.replace("_", " "), **{run.id: _text(held[run.id].get(name)) for run in runs}}
            for name in names if len({_text(found.get(name)) for found in held.values()}) > 1]


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in facts.items():
        found |= {f"{name}: {key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return found


def _text(value: Any) -> str:
    if value is None:
        return words.MISSING
    text = str(value)
    return text[:12] if len(text) == 64 and set(text) <= set("0123456789abcdef") else text


def comparable(runs: Sequence[Run]) -> list[str]:
    """Why figures of these runs say nothing about each other; empty when they do."""
    reasons = {"evaluation_digest": "they were judged on different data",
               "model_digest": "they are of different models"}
    return [reason for fact, reason in reasons.items() if len({_text(run.facts.get(fact)) for run in runs}) > 1]


def figures(rows: Sequence[Sequence[Row]]) -> list[Figures]:
    """Every figure of every engine that at least two of the runs have, in the first run's order."""
    by_name = [{label(row): record(row) for row in one} for one in rows]
    names = list(dict.fromkeys(name for one in by_name for name in one if sum(name in other for other in by_name) > 1))
    found = []
    for name in names:
        records = [one.get(name) for one in by_name]
        first = next(entry for entry in records if entry is not None)
        for axis in (*QUALITY.values(), *COST.values()):
            values = [entry[axis.key] if entry else None for entry in records]
            if any(value is not None for value in values):
                changes = [change(first, entry, axis) if entry and entry is not first else None for entry in records]
                found.append(Figures(name, axis, values, changes))
    return found


def written(value: float | None, axis: Axis) -> str:
    return words.number(None if value is None else value * axis.scale, axis.digits, signed=axis.key == "delta_nll")
