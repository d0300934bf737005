"""What pydantic finds wrong with a value, in words: what it must be, and what was found.

pydantic speaks Python ("Input should be a valid tuple") and leaves the value to its own report. Whoever reads YAML,
JSON or a command line says the place; this module says the rest. It imports nothing, so that the command line may.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calib.errors import shown

_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text",
          "bytes": "bytes, like b'\\x00'",
          "tuple": "a list", "list": "a list", "set": "a list", "dict": "a mapping of keys to values",
          "mapping": "a mapping of keys to values", "model": "a mapping of keys to values"}
_BOUNDS = {"greater_than_equal": ("at least", "ge"), "greater_than": ("above", "gt"), "less_than_equal": ("at most",
           "le"), "less_than": ("below", "lt")}


def fault_words(fault: Mapping[str, Any]) -> str:
    """One entry of ``ValidationError.errors()``: "must be at least 0, not -1", "is missing", or a validator's words."""
    kind, found = str(fault["type"]), shown(fault.get("input"))
    if kind in _BOUNDS:
        word, key = _BOUNDS[kind]
        return f"must be {word} {_number(fault['ctx'][key])}, not {found}"
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is not a known key"
    if kind == "value_error":
        return str(fault["msg"]).removeprefix("Value error, ")
    if kind == "literal_error":
        return f"must be {fault['ctx']['expected']}, not {found}"
    if kind == "string_pattern_mismatch":
        return f"must match {fault['ctx']['pattern']}, not {found}"
    if kind == "union_tag_invalid":
        return f"{fault['ctx']['discriminator']} must be one of {fault['ctx']['expected_tags']}, not {found}"
    if kind in ("too_long", "string_too_long"):
        return f"must have at most {_entries(kind, fault['ctx']['max_length'])}, not {found}"
    if kind in ("too_short", "string_too_short"):
        return f"must have at least {_entries(kind, fault['ctx']['min_length'])}, not {found}"
    if kind == "union_tag_not_found":
        return f"{fault['ctx']['discriminator']} is missing in {found}"
    if kind == "invalid_key":
        return f"a key must be text, not {found}"
    if kind == "none_required":
        return f"must be left out, not {found}"
    wanted = _KINDS.get(kind.partition("_")[0]) if kind.endswith(("_type", "_parsing", "_from_float")) else None
    return f"must be {wanted}, not {found}" if wanted else f"{fault['msg']} (found {found})"


def _entries(kind: str, count: int) -> str:
    one, several = ("character", "characters") if kind.startswith("string") else ("entry", "entries")
    return f"{count:,} {one if count == 1 else several}"


def _number(bound: Any) -> str:
    return f"{bound:,}" if isinstance(bound, int) and abs(bound) >= 10_000 else f"{bound:g}"
