"""github-action-benchmark's custom JSON: [{"name", "unit", "value", "range", "extra"}, ...], one file a direction.

The action has no direction per figure, only ``customSmallerIsBetter`` or ``customBiggerIsBetter`` for a whole file, and
alarms when a figure got "worse" by that word. So a sweep is written as two files, parted by the direction in
``evals.metric``. Invalid cells are left out: a chart must not show them as measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from calib.artifact import write_atomic
from calib.scheme import Frozen
from evals.errors import MeasureError
from evals.foreign.record import ForeignFormatError, read_json
from evals.metric import metric
from evals.report import Cell, LatencySweep

TOOL = "github-action-benchmark"
Direction = Literal["customSmallerIsBetter", "customBiggerIsBetter"]
_FIGURES = ("ttft_ms", "tpot_ms", "e2e_ms", "out_tok_s", "total_tok_s")
_SPREADS = {"ttft_ms": "ttft_ms_spread", "tpot_ms": "tpot_ms_spread"}


class Entry(Frozen):
    """One figure of one commit. ``range`` is free text ("± 0.3"), ``extra`` a tooltip."""

    name: str = Field(min_length=1)
    unit: str
    value: float = Field(allow_inf_nan=False)
    range: str | None = None
    extra: str | None = None


def entries(sweep: LatencySweep) -> dict[Direction, list[Entry]]:
    """A sweep's valid cells by direction. MeasureError when no cell is valid."""
    found: dict[Direction, list[Entry]] = {"customSmallerIsBetter": [], "customBiggerIsBetter": []}
    for cell in sweep.cells:
        if cell.invalid is None:
            for name in _FIGURES:
                _add(found, cell, name, sweep.device)
    if not found["customSmallerIsBetter"]:
        raise MeasureError(f"none of {len(sweep.cells)} cells is valid", "Measure again; see the cells' reasons.")
    return found


def _add(found: dict[Direction, list[Entry]], cell: Cell, name: str, device: str) -> None:
    value: float | None = getattr(cell, name)
    if value is None:
        return
    known, spread = metric(name), getattr(cell, _SPREADS[name]) if name in _SPREADS else None
    direction: Direction = "customSmallerIsBetter" if known.better == "lower" else "customBiggerIsBetter"
    place = f"{cell.mode} batch={cell.batch_size} isl={cell.isl} osl={cell.osl}"
    found[direction].append(Entry(name=f"{known.title}: {place}", unit=known.unit, value=value,
                                  range=None if spread is None else f"± {spread / 2:.4g}",
                                  extra=f"n={cell.n} on {device}; {known.formula}"))


def write(sweep: LatencySweep, folder: Path | str) -> dict[Direction, Path]:
    """Write ``<direction>.json`` for each direction that has figures."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[Direction, Path] = {}
    for direction, listed in entries(sweep).items():
        if listed:
            written[direction] = folder / f"{direction}.json"
            content: list[dict[str, Any]] = [entry.model_dump(mode="json", exclude_none=True) for entry in listed]
            write_atomic(written[direction], json.dumps(content, ensure_ascii=False, indent=2).encode())
    return written


def read(path: Path | str) -> Sequence[Entry]:
    """The entries of one file. ForeignFormatError for another layout, no entries, or a name that comes twice."""
    found = read_json(path, TOOL)
    if not isinstance(found, list) or not found:
        raise ForeignFormatError(f"{path} is no list of entries, or an empty one", f"Give a {TOOL} file.")
    try:
        listed = [Entry.model_validate(entry) for entry in found]
    except ValidationError as error:
        first = error.errors()[0]
        raise ForeignFormatError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}",
                                 f"Give a {TOOL} file.") from error
    names = [entry.name for entry in listed]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ForeignFormatError(f"{path} has {doubled[0]!r} twice", "Each figure may come once.")
    return listed
