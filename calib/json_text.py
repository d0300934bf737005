"""JSON from outside: one way to read it that ends in a value or in an error with two lines.

``json.loads`` alone answers hostile or damaged text with four kinds of exception (bad syntax, bytes that are no UTF-8,
nesting beyond Python's stack, numbers of thousands of digits), guesses UTF-16 and UTF-32, keeps the last of two values
of one name silently (other readers keep the first), and lets through strings that no UTF-8 file can hold: half of a
surrogate pair, on which a tokenizer or a hash fails much later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from calib.errors import ToolkitError, shown

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(data: bytes | str, where: str, fault: Callable[[str, str], ToolkitError],
               hint: str = "Copy or download this file again.") -> Any:
    """The value of a JSON text. ``fault(message, hint)`` is raised when it is none, or has one name twice in an object.
    ``where`` names file and line."""
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
        value = json.loads(text, object_pairs_hook=_unique)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        raise fault(f"{where} holds half of a surrogate pair, which is no character", hint) from error
    except UnicodeDecodeError as error:
        raise fault(f"{where} is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}", hint) from error
    except RecursionError as error:
        raise fault(f"{where} is nested too deeply to be read", hint) from error
    except _TwiceError as error:
        raise fault(f"{where}: {error}", "Keep one of the two, or copy the file again.") from error
    except json.JSONDecodeError as error:
        raise fault(f"{where} is not JSON: {error}", hint) from error
    except ValueError as error:
        raise fault(f"{where}: {str(error).partition(';')[0]}", hint) from error


def parse_object(data: bytes | str, where: str, fault: Callable[[str, str], ToolkitError],
                 hint: str = "Copy or download this file again.") -> dict[str, Any]:
    """Like ``parse_json`` for a text that must be an object."""
    value = parse_json(data, where, fault, hint)
    if not isinstance(value, dict):
        raise fault(f"{where} holds {_article(value)}, not a JSON object", hint)
    return value


def _article(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number",
             type(None): "null"}
    return names.get(type(value), type(value).__name__)


class _TwiceError(ValueError):
    """One name, two values."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _TwiceError(f"the name {shown(name)} occurs twice, with {shown(found[name])} and {shown(value)}")
        found[name] = value
    return found
