"""YAML from outside, read as the plain data that people write: text, numbers, lists and mappings.

YAML's own reader keeps the last of two equal keys, so that half of an edited file is ignored silently; expands aliases
of aliases into billions of nodes; turns ``2026-01-01`` into a date; and answers deep nesting with a crash. A settings
file needs none of that: a doubled key, an alias, a tag or a date are refused with the line they stand in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from calib.errors import ToolkitError

MAX_BYTES = 1024 * 1024
_DEPTH = 32


class _Plain(yaml.SafeLoader):
    """SafeLoader without aliases, doubled keys, deep nesting and dates."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(problem="aliases are not read", problem_mark=event.start_mark)
        self._depth = getattr(self, "_depth", 0) + 1
        if self._depth > _DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {_DEPTH} levels",
                                       problem_mark=self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def plain_mapping(self, node: yaml.MappingNode) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool | None):
                raise yaml.MarkedYAMLError(problem="a key must be plain text", problem_mark=key_node.start_mark)
            if key in found:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} occurs twice", problem_mark=key_node.start_mark)
            found[key] = self.construct_object(value_node, deep=True)
        return found

    def plain_number(self, node: yaml.ScalarNode) -> float:
        value = self.construct_yaml_float(node)
        if not math.isfinite(value):
            raise yaml.MarkedYAMLError(problem=f"{node.value} is no finite number", problem_mark=node.start_mark)
        return value

    def refused(self, node: yaml.Node) -> Any:
        raise yaml.MarkedYAMLError(problem=f"{node.tag.rpartition(':')[2]} values are not read; quote the text",
                                   problem_mark=node.start_mark)


_Plain.add_constructor("tag:yaml.org,2002:map", _Plain.plain_mapping)
_Plain.add_constructor("tag:yaml.org,2002:float", _Plain.plain_number)
for _kind in ("timestamp", "binary", "set", "omap", "pairs", "merge"):
    _Plain.add_constructor(f"tag:yaml.org,2002:{_kind}", _Plain.refused)


def read_yaml(path: Path, fault: Callable[[str, str], ToolkitError], hint: str) -> dict[Any, Any]:
    """The mapping that a YAML file holds; ``fault(message, hint)`` is raised when there is none."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise fault(f"{path} has {size:,} bytes; a settings file has at most {MAX_BYTES:,}", hint)
        content = yaml.load(path.read_text(encoding="utf-8"), _Plain)
    except OSError as error:
        raise fault(f"cannot read {path}: {error.strerror or error}", hint) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise fault(f"{path} is not YAML: {' '.join(str(error).split())[:300]}", hint) from error
    if not isinstance(content, dict):
        raise fault(f"{path} holds {type(content).__name__}, not a mapping", hint)
    return content
