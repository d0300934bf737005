"""Two runs side by side: what differs in how they were made, and each engine's figures against the other's.

Engines are matched by recipe and KV cache. A change counts as seen only when the intervals part (quality) or the ranges
of the repeats do (time); otherwise it is printed as what it is, within the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from evals.report import Row
from evals.tradeoff import label
from toolkit.errors import UsageError
from toolkit.report import words
from toolkit.report.axes import COST, QUALITY, Axis
from toolkit.report.tables import record
from toolkit.store import Run, StoredRow

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both runs. ``seen``: the intervals do not overlap. None where either has no figure."""

    first: float | None
    second: float | None
    seen: bool | None


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    same_engine: bool
    changes: dict[str, Change]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Comparison:
    first: str
    second: str
    facts: dict[str, list[str]]
    lines: list[Line]


def compare_runs(first: Run, first_rows: Sequence[StoredRow], second: Run, second_rows: Sequence[StoredRow]
                 ) -> Comparison:
    """UsageError when the runs judged different data, whose figures say nothing about each other."""
    for fact in ("evaluation_digest", "model_digest"):
        if first.facts.get(fact) != second.facts.get(fact):
            raise UsageError(f"runs {first.id} and {second.id} may not be compared: {fact.replace('_', ' ')} differs",
                             "Compare runs of the same model on the same evaluation data.")
    olds = {(stored.row.recipe, stored.row.kv_cache): stored.row for stored in first_rows}
    lines = [_line(olds[key], stored.row) for stored in second_rows
             if (key := (stored.row.recipe, stored.row.kv_cache)) in olds]
    if not lines:
        raise UsageError(f"runs {first.id} and {second.id} have no recipe in common", "Compare other runs.")
    facts = {name: [_text(first.facts.get(name)), _text(second.facts.get(name))]
             for name in sorted({*first.facts, *second.facts}) if first.facts.get(name) != second.facts.get(name)}
    return Comparison(first.id, second.id, facts, lines)


def _text(value: Any) -> str:
    return words.MISSING if value is None else str(value)


def _line(old: Row, new: Row) -> Line:
    before, after = record(old), record(new)
    return Line(label(new), old.engine_digest == new.engine_digest,
                {axis.key: change(before, after, axis) for axis in (*QUALITY.values(), *COST.values())})


def change(before: dict[str, Any], after: dict[str, Any], axis: Axis) -> Change:
    first, second = before[axis.key], after[axis.key]
    if first is None or second is None:
        return Change(first, second, None)
    low, high = f"{axis.key}_low", f"{axis.key}_high"
    if before.get(low) is None or after.get(low) is None:
        return Change(first, second, first != second)
    return Change(first, second, before[high] < after[low] or after[high] < before[low])


def comparison_table(found: Comparison) -> list[RenderableType]:
    """For the terminal: a table of ``first -> second``, changes beyond the noise in bold."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    keys = ("delta_nll", "accuracy", "tpot_ms", "out_tok_s", "size_bytes")
    axes = {axis.key: axis for axis in (*QUALITY.values(), *COST.values())}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("engine")
    for key in keys:
        table.add_column(Text.assemble(axes[key].title, ("\n" + axes[key].unit, "dim not bold")), justify="right",
                         overflow="fold")
    for line in found.lines:
        cells = [Text(_arrow(line.changes[key], axes[key]), style="bold" if line.changes[key].seen else "dim")
                 for key in keys]
        table.add_row(line.label, *cells)
    lines = [f"{name.replace('_', ' ')}: {old} -> {new}" for name, (old, new) in found.facts.items()]
    return [Text(f"{found.first} -> {found.second}; bold: beyond the intervals", style="dim"), table,
            Text("\n".join(lines) if lines else "The runs were made alike.", style="dim")]


def _arrow(change: Change, axis: Axis) -> str:
    def written(value: float | None) -> str:
        return words.number(None if value is None else value * axis.scale, axis.digits,
                            signed=axis.key == "delta_nll")
    return f"{written(change.first)} -> {written(change.second)}"
