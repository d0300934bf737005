"""What all importers share: strict reading, and the error for another layout.

Names clash between tools (``evals.metric`` has the dictionary), so every importer writes into the same explicit
columns (``evals.loads``) and says nothing about what its tool did not measure: a figure that is not in the file stays
None. A file of another layout or version is refused by name, never read as far as it happens to fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calib.json_text import parse_json
from evals.errors import EvalError


class ForeignFormatError(EvalError):
    """A file of another tool that is not in the layout, or not of the version, that can be read."""

    code = "foreign_format"


def read_json(path: Path | str, tool: str) -> Any:
    """A JSON document. ForeignFormatError when it cannot be read or parsed."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ForeignFormatError(f"cannot read {path}: {error.strerror}", f"Give a {tool} file.") from error
    return parse_json(content, str(path), ForeignFormatError, f"Give a {tool} file.")


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
