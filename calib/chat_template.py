"""A model's chat template, rendered as the foreign program it is.

Jinja's immutable sandbox keeps it from attributes and from changing its arguments. On top of that: a deadline (checked
by a trace function on every line of the compiled template, in this thread only), a bound on the output, and a bound on
what ``*`` and ``**`` may produce.

Masking: special strings anywhere inside messages and tools are replaced by marks from the private use area before
rendering, so that whatever special string the output still holds was written by the template itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from calib.errors import CalibError

SECONDS = 5.0
OUTPUT_CHARS = 4_000_000
_PRODUCT = 1_000_000


class _TooMuchError(Exception):
    """The template went over one of its bounds."""


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}`` marks assistant text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) if isinstance(side, (str, list, tuple)) else abs(side) for side in (left, right)
                 if isinstance(side, (str, list, tuple, int, float))]
        if operator == "**" or (len(sizes) == 2 and sizes[0] * sizes[1] > _PRODUCT):
            raise _TooMuchError(f"operator {operator} with operands of size {sizes}")
        return super().call_binop(context, operator, left, right)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _deadline_tracer(deadline: float) -> Callable[[FrameType, str, Any], Any]:
    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise _TooMuchError(f"more than {SECONDS:g} s")
        return trace
    return trace


class ChatTemplate:
    """A compiled template. ``origin`` names the model in errors."""

    def __init__(self, source: str, origin: str) -> None:
        self._origin = origin
        self.source = source
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            #: Whether the template looks at tools at all.
            self.takes_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise CalibError(f"the chat template of {origin} does not compile: {error}",
                             "Repair chat_template in the model folder.") from error

    def render(self, messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any],
               add_generation_prompt: bool, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The rendered conversation. CalibError when the template refuses it or exceeds a bound."""
        if tools and not self.takes_tools:
            raise CalibError(f"the chat template of {self._origin} takes no tools", "Use a model that was taught them.")
        before = sys.gettrace()
        pieces, size = [], 0
        try:
            sys.settrace(_deadline_tracer(time.monotonic() + SECONDS))
            for piece in self._template.generate(messages=checked_messages(messages), tools=tools, documents=None,
                                                 add_generation_prompt=add_generation_prompt, **names):
                size += len(piece)
                if size > OUTPUT_CHARS:
                    raise _TooMuchError(f"more than {OUTPUT_CHARS} characters")
                pieces.append(piece)
        except _TooMuchError as error:
            raise CalibError(f"the chat template of {self._origin} was stopped: {error}",
                             "Shorten the messages; if they are short, do not trust this template.") from error
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise CalibError(f"the chat template of {self._origin} refuses these messages: {error}",
                             "Check the roles and their order against the model's card.") from error
        finally:
            sys.settrace(before)
        return "".join(pieces)

    @staticmethod
    def mask(messages: Sequence[Mapping[str, Any]], specials: Sequence[str],
             tools: Sequence[Mapping[str, Any]] | None = None
             ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, str]]:
        """Messages and tools with special strings in them replaced by marks, and the marks' originals."""
        checked = checked_messages(messages)
        everything = "".join(_strings([checked, list(tools or ())]))
        present = sorted((special for special in specials if special in everything), key=len, reverse=True)
        nonce = next(n for n in range(len(everything) + 1) if f"\ue000{n}\ue001" not in everything)
        originals = {f"\ue000{nonce}\ue001{index}\ue002": special for index, special in enumerate(present)}

        def masked(text: str) -> str:
            for mark, special in originals.items():
                text = text.replace(special, mark)
            return text
        return _mapped(checked, masked), None if tools is None else _mapped(list(tools), masked), originals


def _strings(value: Any) -> Iterator[str]:
    """Every string in nested lists and dicts, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The same nesting with every string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(inner, change) for inner in value]
    return value


#: What a message may hold, and of which type.
_FIELDS: dict[str, type] = {"role": str, "content": str, "name": str, "tool_calls": list, "tool_call_id": str}


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages with text contents; parts [{"type": "text", "text": ...}] are joined.

    An assistant's message may hold ``tool_calls`` [{"type": "function", "function": {"name", "arguments": dict}}] with
    or without a content; a tool's message ``tool_call_id``.
    """
    if not messages:
        raise CalibError("the conversation is empty", "Give at least one message with a role and a content.")
    checked = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part["text"] if part.get("type") == "text" and isinstance(part.get("text"), str)
                              else _refuse(index, part) for part in content)
        if content is None and message.get("tool_calls"):
            content = ""
        found = {**message, "content": content}
        if "role" not in found or not all(isinstance(value, _FIELDS.get(key, type(None)))
                                          for key, value in found.items()):
            _refuse(index, dict(message))
        checked.append(found)
    return checked


def _refuse(index: int, found: Any) -> NoReturn:
    raise CalibError(f"message {index} is not a text message: {str(found)[:120]}",
                     'A message is {"role": "user", "content": "..."}.')
