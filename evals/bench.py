"""The cell writer that all of benchmarks/ uses: one JSON document, one cell a measurement.

    {"date", "commit", "device", "versions", "command", "cells": [{"name", "value", "unit", "floor", "peer",
     "peer_name", "spread"}, ...]}

``value`` is the median over repeats and ``spread`` their max - min; ``floor`` is what the hardware or theory allows at
best (for a probability: what is demanded), ``peer`` the same formula measured on another tool. A decode step is
``(T(n) - T(1))/(n - 1)`` through the public ``generate``, wall clock, for ours and the peer's alike.
"""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from pydantic import Field

from calib.artifact import canonical_json, installed_versions, write_atomic
from calib.scheme import Frozen
from evals.errors import MeasureError


class BenchCell(Frozen):
    """One measurement. A figure that was not measured is null; ``spread`` is in the value's unit."""

    name: str = Field(min_length=1)
    value: float
    unit: str = Field(min_length=1)
    floor: float | None = None
    peer: float | None = None
    peer_name: str | None = None
    spread: float | None = Field(default=None, ge=0)


def cell_of(name: str, values: Sequence[float], unit: str, *, floor: float | None = None, peer: float | None = None,
            peer_name: str | None = None) -> BenchCell:
    """A cell from repeats: their median, and max - min as spread (null for a single value)."""
    if not len(values):
        raise MeasureError(f"cell {name!r} has no values", "A benchmark writes what it measured or nothing.")
    spread = float(np.ptp(values)) if len(values) > 1 else None
    return BenchCell(name=name, value=float(np.median(values)), unit=unit, floor=floor, peer=peer,
                     peer_name=peer_name, spread=spread)


def device_name() -> str:
    """The processor's model and core count (accelerator benchmarks pass their own name)."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
        return f"{model} x{len(lines) or 1}"
    return model


def commit() -> str:
    """The checkout's commit, with ``+`` when it has uncommitted changes; ``unknown`` outside a checkout."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True,
                              check=True).stdout.strip()
    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_cells(path: Path | str, cells: Iterable[BenchCell], command: str | None = None, *,
                device: str | None = None) -> None:
    """Write a benchmark's document. MeasureError for no cells, two of one name, or a value that is not finite."""
    cells = list(cells)
    names = [cell.name for cell in cells]
    if not cells or len(set(names)) < len(names):
        doubled = sorted({name for name in names if names.count(name) > 1})
        raise MeasureError(f"cells {doubled or 'are missing'}", "Each cell is written once.")
    bad = [cell.name for cell in cells
           if not all(np.isfinite(v) for v in (cell.value, cell.floor, cell.peer, cell.spread) if v is not None)]
    if bad:
        raise MeasureError(f"cell {bad[0]!r} is not finite", "The measurement failed; look at its log.")
    document = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(),
                "device": device or device_name(), "versions": installed_versions(),
                "command": command or _command(),
                "cells": [cell.model_dump(mode="json") for cell in cells]}
    write_atomic(Path(path), canonical_json(document) + b"\n")


def _command() -> str:
    """The command line, with paths as seen from here: a result speaks of the project, not of one machine's folders."""
    here = f"{Path.cwd()}/"
    words = [word.replace(here, "") for word in sys.argv]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name.startswith("benchmarks."):
        words[:1] = ["-m", spec.name]
    return shlex.join(["python", *(Path(word).name if Path(word).is_absolute() else word for word in words)])


def table(cells: Sequence[BenchCell]) -> str:
    """The cells as aligned text for a terminal."""
    rows = [(cell.name, f"{cell.value:.4g}", cell.unit, "" if cell.floor is None else f"{cell.floor:.4g}",
             "" if cell.peer is None else f"{cell.peer:.4g} {cell.peer_name or ''}",
             "" if cell.spread is None else f"{cell.spread:.2g}") for cell in cells]
    rows.insert(0, ("cell", "value", "unit", "floor", "peer", "spread"))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)
