"""YAML from outside, read as the plain data that people write: text, numbers, lists and mappings.

YAML's own reader keeps the last of two equal keys, so that half of an edited file is ignored silently; expands aliases
of aliases into billions of nodes; turns ``2026-01-01`` into a date; and answers deep nesting with a crash. A settings
file needs none of that: a doubled key, an alias, a tag or a date are refused with the line they stand in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from calib.errors import ToolkitError

MAX_BYTES = 1024 * 1024
_DEPTH = 32
_TAG = "tag:yaml.org,2002:"
_REFUSED = ("timestamp", "binary", "set", "omap", "pairs", "merge")
#: YAML 1.1 also reads 010 as 8, 1_0 as 10, 0x10 as 16 and 1:30 as 90: to people and to YAML 1.2 they are others.
_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_NAMES = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}


def _odd(problem: str, place: Any) -> yaml.MarkedYAMLError:
    """A fault at a node's or an event's place."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


class _Plain(yaml.SafeLoader):
    """SafeLoader without aliases, doubled keys, deep nesting and dates."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise _odd("aliases are not read: write the value out", self.peek_event())
        self._depth = getattr(self, "_depth", 0) + 1
        if self._depth > _DEPTH:
            raise _odd(f"nested deeper than {_DEPTH} levels", self.peek_event())
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def plain_mapping(self, node: yaml.MappingNode) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool | None):
                raise _odd("a key must be plain text", key_node)
            if key in found:
                raise _odd(f"the key {key!r} occurs twice: keep one", key_node)
            found[key] = self.construct_object(value_node, deep=True)
        return found

    def plain_int(self, node: yaml.ScalarNode) -> int:
        value = int(self.construct_yaml_int(node))
        if not _WHOLE.fullmatch(node.value):
            as_read = node.value.replace("_", "").lstrip("+-").lstrip("0")
            other = f" or {'-' * (value < 0)}{as_read}" if as_read.isdecimal() and as_read != str(abs(value)) else ""
            raise _odd(f"{node.value} is no decimal number, and readers of YAML differ over it: write {value}{other}, "
                       "or quote the text", node)
        return value

    def plain_number(self, node: yaml.ScalarNode) -> float:
        if "_" in node.value or ":" in node.value:
            raise _odd(f"{node.value} is no decimal number: write its digits alone, or quote the text", node)
        value = self.construct_yaml_float(node)
        if not math.isfinite(value):
            raise _odd(f"{node.value} is no finite number", node)
        return value

    def plain_text(self, node: yaml.ScalarNode) -> str:
        value = self.construct_yaml_str(node)
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise _odd("half of a surrogate pair is no character", node)
        return str(value)

    def refused(self, node: yaml.Node) -> Any:
        known = node.tag.removeprefix(_TAG)
        what = f"{known} values are" if known in _REFUSED else f"the tag {node.tag!r} is"
        mend = "write the keys out" if known == "merge" else "quote the text, or leave the tag out"
        raise _odd(f"{what} not read: {mend}", node)


# 1e-3 and 1.5e3 are numbers in YAML 1.2, and to everybody; PyYAML's rules of 1.1 take them for texts.
_Plain.add_implicit_resolver(f"{_TAG}float", re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+\Z"),
                             list("-+.0123456789"))
_Plain.add_constructor(f"{_TAG}map", _Plain.plain_mapping)
_Plain.add_constructor(f"{_TAG}str", _Plain.plain_text)
_Plain.add_constructor(f"{_TAG}float", _Plain.plain_number)
_Plain.add_constructor(f"{_TAG}int", _Plain.plain_int)
for _tag in (*(f"{_TAG}{kind}" for kind in _REFUSED), None):  # None: any tag that is not known
    _Plain.add_constructor(_tag, _Plain.refused)


def read_yaml(path: Path, fault: Callable[[str, str], ToolkitError], hint: str) -> dict[Any, Any]:
    """The mapping that a YAML file holds; ``fault(message, hint)`` is raised when there is none."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise fault(f"{path} has {size:,} bytes; a settings file has at most {MAX_BYTES:,}", hint)
        content = yaml.load(path.read_text(encoding="utf-8"), _Plain)
    except OSError as error:
        raise fault(f"cannot read {path}: {error.strerror or error}", hint) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        said = " ".join(f"{error.context or ''} {error.problem or 'a fault'}".split())
        raise fault(f"{path} is not YAML as it is read here{where}: {said[:300]}", hint) from error
    except UnicodeDecodeError as error:
        where = f"byte {error.object[error.start]:#04x} at {error.start}"
        raise fault(f"{path} is not YAML: {where} is not UTF-8", hint) from error
    except RecursionError as error:
        raise fault(f"{path} is nested too deeply to be read", hint) from error
    except (yaml.YAMLError, ValueError) as error:
        said = " ".join(str(error).partition(";")[0].split())
        raise fault(f"{path} is not YAML: {said[:300]}", hint) from error
    if content is None:
        raise fault(f"{path} is empty: it holds no key", hint)
    if not isinstance(content, dict):
        raise fault(f"{path} holds {_NAMES.get(type(content), 'a value')}, not a mapping of keys to values", hint)
    return content
