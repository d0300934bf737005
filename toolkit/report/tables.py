"""Rows as tables: for a terminal (rich), for Markdown, and as a DataFrame of numbers for figures and the page.

The columns are listed once, in ``COLUMNS``; each says how its figure is written. A terminal gets as many as fit whole,
the ones a choice is made by first; everything else gets all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evals.cpu_state import busy_note
from evals.report import Row
from evals.tradeoff import figure_of, label
from toolkit.report import words

if TYPE_CHECKING:
    import pandas
    from rich.table import Table
    from rich.text import Text

WIDE = 150


@dataclass(frozen=True, slots=True)
class Column:
    """``write`` turns a row into the cell's text; where not all columns fit, the highest ``rank`` goes first."""

    title: str
    unit: str
    write: Callable[[Row], str]
    rank: int = 0
    left: bool = False


COLUMNS = (
    Column("engine", "", label, left=True),
    Column("ΔNLL", "nats/token [95 %]", lambda row: words.nats_interval(row.delta_nll)),
    Column("KL", "nats/token", lambda row: words.number(row.kl_mean, 4), rank=5),
    Column("same top-1", "", lambda row: words.percent(row.same_top1), rank=8),
    Column("accuracy", "[95 %]", lambda row: words.percent_interval(row.accuracy), rank=3),
    Column("flips", "", lambda row: words.percent(row.flips), rank=7),
    Column("TTFT", "ms", lambda row: words.milliseconds(row.ttft_ms), rank=4),
    Column("TPOT", "ms", lambda row: words.milliseconds(row.tpot_ms)),
    Column("output", "tok/s", lambda row: words.rate(row.out_tok_s), rank=1),
    Column("size", "", lambda row: words.size(row.size_bytes), rank=2),
    Column("memory", "peak", lambda row: words.size(row.peak_memory_bytes), rank=6),
    Column("verdict", "", lambda row: row.verdict or words.MISSING, left=True),
)


def caption(rows: Sequence[Row]) -> list[str]:
    """What a reader must know to read the table: the cell, what is emulated, what the weights came from."""
    lines = []
    cells = sorted({(row.batch_size, row.isl, row.osl) for row in rows if row.batch_size is not None})
    if cells:
        lines.append("Latency: " + "; ".join(f"batch {batch}, {isl} tokens in, {osl} out" for batch, isl, osl in cells)
                     + f" on {', '.join(sorted({row.device for row in rows}))}.")
    if any(row.accuracy for row in rows):
        tasks = sorted({task for row in rows if row.accuracy for task in row.accuracy.tasks})
        counts = sorted({row.accuracy.n for row in rows if row.accuracy})
        lines.append(f"Accuracy: {', '.join(tasks)}, {'/'.join(map(str, counts))} questions.")
    texts = sorted({row.delta_nll.n for row in rows if row.delta_nll})
    if texts:
        lines.append(f"ΔNLL against the unquantized model on {'/'.join(map(str, texts))} documents; lower is better.")
    emulated = [label(row) for row in rows if row.emulated]
    if emulated:
        lines.append(f"Emulated on this device, so accurate but no faster for its format: {', '.join(emulated)}.")
    busy = busy_note([cell.waited for row in rows for cell in row.cells])
    if busy:
        lines.append(busy)
    grids = sorted({row.source_grid for row in rows if row.source_grid})
    if grids:
        lines.append(f"The baseline's own weights came from {', '.join(grids)}.")
    return lines


def terminal(rows: Sequence[Row], width: int = WIDE) -> Table:
    """A rich table, numbers right-aligned, verdicts coloured, no cell cut where the columns of rank 0 fit."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = list(COLUMNS)
    needed = {column.title: max(map(len, (column.title, column.unit, *(_cell(column, row).plain for row in rows))))
              for column in columns}
    while sum(needed[column.title] + 3 for column in columns) - 2 > width and any(column.rank for column in columns):
        columns.remove(max(columns, key=lambda column: column.rank))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        heading = Text.assemble(column.title, ("\n" + column.unit if column.unit else "", "dim not bold"))
        table.add_column(heading, justify="left" if column.left else "right", no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(*[_cell(column, row) for column in columns])
    return table


def _cell(column: Column, row: Row) -> Text:
    from rich.text import Text

    from toolkit.console import verdict_text

    return verdict_text(row.verdict) if column.title == "verdict" else Text(column.write(row))


def escape_markdown(text: str) -> str:
    """Text that Markdown and the HTML it may become show as it is."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for character in "\\`*_[]|#":
        escaped = escaped.replace(character, f"\\{character}")
    return " ".join(escaped.split())


def markdown(rows: Sequence[Row]) -> str:
    """A GitHub table with all columns; every cell escaped."""
    heads = [f"{column.title} ({column.unit})" if column.unit else column.title for column in COLUMNS]
    lines = ["| " + " | ".join(escape_markdown(head) for head in heads) + " |",
             "|" + "|".join(":--" if column.left else "--:" for column in COLUMNS) + "|"]
    lines += ["| " + " | ".join(escape_markdown(column.write(row)) for column in COLUMNS) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def defused(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def csv(rows: Sequence[Row]) -> str:
    """Full-precision figures, one engine a line; a cell that a spreadsheet would run as a formula is defused."""
    table = frame(rows)
    for name in table.columns[[table[name].dtype.kind not in "fiub" for name in table.columns]]:
        table[name] = [defused(value) for value in table[name]]
    return str(table.to_csv(index=False))


def _interval(row: Row, name: str) -> dict[str, float | None]:
    """A figure with both ends: its confidence interval, or the range that the repeats covered."""
    figure = figure_of(row, name)
    return {name: figure.value if figure else None, f"{name}_low": figure.low if figure else None,
            f"{name}_high": figure.high if figure else None}


def record(row: Row) -> dict[str, Any]:
    """One row as flat numbers. Shares stay shares (0..1), bytes bytes, None where nothing was measured."""
    return {"engine": label(row), "recipe": row.recipe, "kv_cache": row.kv_cache, "device": row.device,
            "emulated": row.emulated, "verdict": row.verdict, "verdict_reason": row.verdict_reason,
            **_interval(row, "delta_nll"), "delta_nll_n": row.delta_nll.n if row.delta_nll else None,
            **_interval(row, "accuracy"), "accuracy_n": row.accuracy.n if row.accuracy else None,
            "kl_mean": row.kl_mean, "same_top1": row.same_top1, "flips": row.flips,
            **_interval(row, "ttft_ms"), **_interval(row, "tpot_ms"),
            "out_tok_s": row.out_tok_s, "batch_size": row.batch_size, "isl": row.isl, "osl": row.osl,
            "joules_per_token": energy.value if (energy := figure_of(row, "joules_per_token")) else None,
            "size_bytes": row.size_bytes, "peak_memory_bytes": row.peak_memory_bytes,
            "source_grid": row.source_grid, "engine_digest": row.engine_digest,
            "checkpoint_digest": row.checkpoint_digest}


def frame(rows: Sequence[Row]) -> pandas.DataFrame:
    """One line per engine, columns as in ``record``; numeric columns are float64 with NaN for None."""
    import pandas

    table = pandas.DataFrame([record(row) for row in rows])
    texts = {"engine", "recipe", "kv_cache", "device", "verdict", "verdict_reason", "source_grid", "engine_digest",
             "checkpoint_digest", "emulated"}
    for name in table.columns.difference(list(texts)):
        table[name] = pandas.to_numeric(table[name])
    return table
