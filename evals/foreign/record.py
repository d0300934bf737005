"""What all importers share: the record of one measured load, strict reading, and the error for another layout.

Names clash between tools (``evals.metric`` has the dictionary), so every importer writes into the same explicit
columns and says nothing about what its tool did not measure: a figure that is not in the file stays None. A file of
another layout or version is refused by name, never read as far as it happens to fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from calib.scheme import Frozen
from evals.errors import EvalError


class ForeignFormatError(EvalError):
    """A file of another tool that is not in the layout, or not of the version, that can be read."""

    code = "foreign_format"


class Spread(Frozen):
    """A distribution over requests, in ms: each figure as the tool reports it, None where it does not."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class LoadResult(Frozen):
    """One load against one endpoint, measured by ``tool``. Definitions are ``evals.metric``'s.

    ``tpot_ms`` excludes the first token; ``itl_gap_ms`` pools the gaps between chunks. ``isl`` and ``osl`` are achieved
    means; ``concurrency`` and ``request_rate`` what was asked for (None: not limited, or not told).
    """

    tool: str
    version: str | None = None
    model: str | None = None
    completed: int = Field(ge=0)
    failed: int | None = Field(default=None, ge=0)
    duration_s: float | None = Field(default=None, gt=0)
    concurrency: float | None = Field(default=None, gt=0)
    request_rate: float | None = Field(default=None, gt=0)
    isl: float | None = Field(default=None, ge=0)
    osl: float | None = Field(default=None, ge=0)
    ttft_ms: Spread = Spread()
    tpot_ms: Spread = Spread()
    itl_gap_ms: Spread = Spread()
    e2e_ms: Spread = Spread()
    req_s: float | None = Field(default=None, ge=0)
    out_tok_s: float | None = Field(default=None, ge=0)
    total_tok_s: float | None = Field(default=None, ge=0)
    goodput_req_s: float | None = Field(default=None, ge=0)


def read_json(path: Path | str, tool: str) -> Any:
    """A JSON document. ForeignFormatError when it cannot be read or parsed."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ForeignFormatError(f"cannot read {path}: {error.strerror}", f"Give a {tool} file.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ForeignFormatError(f"{path} is not JSON: {error}", f"Give a {tool} file.") from error


def mapping(value: Any, where: str, tool: str) -> dict[str, Any]:
    """``value`` as a JSON object; ForeignFormatError names the place otherwise."""
    if not isinstance(value, dict):
        raise ForeignFormatError(f"{where} is {type(value).__name__}, not an object", f"Give a {tool} file.")
    return value


def require(found: Mapping[str, Any], keys: tuple[str, ...], where: str, tool: str) -> None:
    """ForeignFormatError naming the keys that the layout has and this file lacks."""
    if missing := [key for key in keys if key not in found]:
        raise ForeignFormatError(f"{where} has no {', '.join(missing)}: it is no {tool} file, or one of another "
                                 "version", f"Give a file that {tool} wrote.")


def number(found: Mapping[str, Any], key: str, where: str) -> float | None:
    """A finite number or None where it is absent or null. Anything else (text, NaN, true) is a ForeignFormatError."""
    value = found.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ForeignFormatError(f"{where}: {key} is {value!r}, not a finite number", "The file is damaged.")
    return float(value)


def count(found: Mapping[str, Any], key: str, where: str) -> int:
    """A whole number >= 0; ForeignFormatError otherwise."""
    value = number(found, key, where)
    if value is None or value < 0 or value != int(value):
        raise ForeignFormatError(f"{where}: {key} is {found.get(key)!r}, not a count", "The file is damaged.")
    return int(value)


def positive(value: float | None) -> float | None:
    """None for a limit that the tool writes as 0 or leaves out."""
    return value if value is not None and value > 0 else None
