"""Small files of measured values that make repeated work unnecessary: kept under the key of all they depend on.

Such a file is never the only copy of anything, so whatever is wrong with it (cut off, another key, one changed digit:
the hash says so) has one mend: measure again. It must never be an error, and never be believed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calib.artifact import canonical_json, sha256_hex, write_atomic


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` as JSON will give them back, with their hash beside them."""
    plain = json.loads(canonical_json(dict(values)))
    return {"sha256": sha256_hex(canonical_json(plain)), "values": plain}


def unsealed(document: Any) -> dict[str, Any] | None:
    """The values of a ``sealed`` document; None when they are not the ones that were sealed."""
    values = document.get("values") if isinstance(document, dict) else None
    if not isinstance(values, dict) or document.get("sha256") != sha256_hex(canonical_json(values)):
        return None
    return values


def read_kept(path: Path, key: str) -> dict[str, Any]:
    """What ``write_kept`` put there under this key; empty when there is nothing that can be believed."""
    try:
        document = json.loads(path.read_bytes())
        values = unsealed(document)
    except (OSError, ValueError, RecursionError):
        return {}
    return values if values is not None and document.get("key") == key else {}


def write_kept(path: Path, key: str, values: Mapping[str, Any]) -> None:
    """Replace the file in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, canonical_json({"key": key, **sealed(values)}))
