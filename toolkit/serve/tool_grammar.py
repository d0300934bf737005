"""Grammars that make a model write tool calls that match the functions' schemas.

Three of them, by what ``tool_choice`` asks for: one call, some calls, or any text in which a call, should there be one,
matches (``auto`` with functions that are ``strict``). How a call is written, ``tagged`` or ``bare``: see ``tools``.

All schemas become one. A reference within a function's schema (``#/$defs/Color``, as pydantic writes them) counts from
that schema's own root, so each schema stands under a name of its own and its references are moved there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from engines.request import MAX_GRAMMAR_BYTES, Grammar
from toolkit.serve.faults import bad
from toolkit.serve.parts import validated
from toolkit.serve.protocol import Tool

__all__ = ["ARGUMENTS", "CLOSE", "OPEN", "Style", "grammar_of"]

Style = Literal["tagged", "bare"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
#: The member of a call that holds its arguments.
ARGUMENTS: dict[Style, str] = {"tagged": "arguments", "bare": "parameters"}
#: Members of a schema that hold data, in which "$ref" is a word like any other.
_DATA = frozenset({"const", "enum", "default", "examples"})
#: Members whose own members are schemas under names of the caller's.
_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def grammar_of(tools: Sequence[Tool], style: Style, *, many: bool, free: bool = False) -> Grammar:
    """Calls of the given functions, each with arguments that match its schema.

    ``many``: one call or several. ``free``: any text, too, before a call or instead of one; the arguments of functions
    that are not ``strict`` may then be any object. ApiError 400 for parameters that are no object.
    """
    schema = json.dumps(_schema(tools, style, free))
    if style == "bare":
        if not free:
            return _checked("json_schema", schema)
        text = "TEXT: /(.|\\n)*/ & ~/[ \\t\\r\\n]*\\{(.|\\n)*/\n"  # an answer that begins with a brace is a call
        return _checked("lark", f"start: TEXT | body\n{text}body: %json {schema}\n")
    call = f'"\\n" body "\\n{CLOSE}"'
    more = f'("\\n{OPEN}" rest)*' if many else ""
    start = f'start: "{OPEN}" rest {more}\n'
    if free:
        start = (f"start: TEXT | intro rest {more}\nTEXT: /(.|\\n)*/ & ~/(.|\\n)*{OPEN}(.|\\n)*/\n"
                 f'intro[suffix="{OPEN}"]: /(.|\\n)*/\n')
    return _checked("lark", f"{start}rest: {call}\nbody: %json {schema}\n")


def _checked(kind: str, source: str) -> Grammar:
    if (size := len(source.encode())) > MAX_GRAMMAR_BYTES:
        raise bad(f"the schemas of these functions make a grammar of {size} bytes; at most {MAX_GRAMMAR_BYTES} are "
                  "allowed", "tools")
    return validated(Grammar, {"kind": kind, "source": source})


def _schema(tools: Sequence[Tool], style: Style, free: bool) -> dict[str, Any]:
    """The schema of a call of any of the functions."""
    calls, own = [], {}
    for number, tool in enumerate(tools):
        function, root = tool.function, f"#/$defs/t{number}"
        loose = free and not function.strict
        own[f"t{number}"] = {"type": "object"} if loose else _moved(_object(function.parameters, function.name), root)
        arguments: dict[str, Any] = {"$ref": root}
        if "type" not in own[f"t{number}"]:
            arguments = {"allOf": [{"type": "object"}, arguments]}
        calls.append({"type": "object", "properties": {"name": {"const": function.name}, ARGUMENTS[style]: arguments},
                      "required": ["name", ARGUMENTS[style]], "additionalProperties": False})
    return {"$defs": own, "anyOf": calls, "x-guidance": _SPACED}


def _object(parameters: dict[str, Any], name: str) -> dict[str, Any]:
    """``parameters`` with what OpenAI's API implies: arguments are an object."""
    kind = parameters.get("type")
    if kind is None:
        composed = {"$ref", "anyOf", "oneOf", "allOf"} & parameters.keys()
        return parameters if composed else parameters | {"type": "object"}
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise bad(f"the arguments of a function are an object: parameters of {name!r} have the type {kind!r}", "tools")
    return parameters | {"type": "object"}


def _moved(schema: Any, root: str) -> Any:
    """``schema`` with its references to "#..." counted from ``root``."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict) or "$id" in schema:  # (its references count from that)
        return schema
    moved: dict[str, Any] = {}
    for key, each in schema.items():
        if key in _NAMED and isinstance(each, dict):
            moved[key] = {name: _moved(its, root) for name, its in each.items()}
        elif key == "$ref" and isinstance(each, str) and (each == "#" or each.startswith("#/")):
            moved[key] = root + each[1:]
        else:
            moved[key] = each if key in _DATA else _moved(each, root)
    return moved
