"""Tool calls: how a model writes them, how they are read back out of its text, and how they are enforced.

The template tells the model how to write a call; which way that is, is read off the template itself:

    tagged    <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>   (Hermes, Qwen and many others)
    bare      {"name": ..., "parameters": {...}} as the whole answer           (Llama 3)

``CallReader`` takes the text as it streams and gives back content and finished calls: what may still be the beginning
of a call is held back, so a client never sees half of the markup; a call that cannot be read stays text. With
``tool_choice`` required or a named function, and for functions that are ``strict``, a grammar makes the model write
calls that match the functions' schemas (``tool_grammar``).
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from engines.request import Grammar
from toolkit.serve.faults import bad
from toolkit.serve.protocol import ChatRequest, NamedTool, Tool
from toolkit.serve.tool_grammar import ARGUMENTS, CLOSE, OPEN, Style, grammar_of


def style_of(template: str) -> Style | None:
    """How a template asks for calls; None when it is neither way."""
    if OPEN in template:
        return "tagged"
    return "bare" if '"parameters"' in template and '"name"' in template else None


@dataclass(frozen=True, slots=True)
class Plan:
    """How one request's tools are handled. ``stop`` ends the text after the first call; ``grammar`` enforces calls."""

    tools: tuple[Tool, ...]
    style: Style
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None


def plan_tools(request: ChatRequest, template: str, takes_tools: bool) -> Plan | None:
    """The plan, or None for a request without tools. ApiError 400 for what this model or server cannot do."""
    if not request.tools or request.tool_choice == "none":
        return None
    style = style_of(template) if takes_tools else None
    if style is None:
        raise bad("this model's chat template takes no tools" if not takes_tools else
                  "this model's template writes tool calls in a way that is not understood here", "tools")
    if request.response_format is not None and request.response_format.type != "text":
        raise bad("response_format and tools exclude each other; set tool_choice to none", "response_format")
    names = [tool.function.name for tool in request.tools]
    if len(set(names)) != len(names):
        raise bad("two tools have the same name", "tools")
    if request.tool_choice in (None, "auto"):
        if any(tool.function.strict for tool in request.tools):
            return Plan(tuple(request.tools), style, grammar=grammar_of(
                request.tools, style, many=request.parallel_tool_calls, free=True))
        one = (CLOSE,) if style == "tagged" and not request.parallel_tool_calls else ()
        return Plan(tuple(request.tools), style, stop=one)
    chosen = list(request.tools)
    if isinstance(request.tool_choice, NamedTool):
        wanted = request.tool_choice.function.name
        chosen = [tool for tool in chosen if tool.function.name == wanted]
        if not chosen:
            raise bad(f"tool_choice names {wanted!r}, which is not among the tools", "tool_choice")
    many = request.parallel_tool_calls and not isinstance(request.tool_choice, NamedTool)
    return Plan(tuple(request.tools), style, grammar=grammar_of(chosen, style, many=many))


@dataclass(frozen=True, slots=True)
class Call:
    """A finished call; ``arguments`` is JSON text."""

    identity: str
    name: str
    arguments: str

    def document(self) -> dict[str, Any]:
        return {"id": self.identity, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallReader:
    """Text in, content and calls out. One a continuation."""

    def __init__(self, plan: Plan | None) -> None:
        self._plan, self._held, self._behind = plan, "", False
        #: Of the call that the held text begins with: from where an end tag is looked for, and where the first stood.
        self._at, self._first = len(OPEN), -1
        self.calls: list[Call] = []

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Take a piece of text; returns what is content for sure, and the calls that it finished."""
        if self._plan is None:
            return text, []
        self._held += text
        return self._bare() if self._plan.style == "bare" else self._tagged()

    def _tagged(self) -> tuple[str, list[Call]]:
        content = ""
        found: list[Call] = []
        while True:
            start = self._held.find(OPEN)
            if start < 0:
                start = len(self._held) - _overlap(self._held, OPEN)
            content += self._between(self._held[:start])
            self._held = self._held[start:]
            end = self._end()
            if end < 0:
                return content, found
            markup = self._split(end)
            call = self._read(markup[len(OPEN):end])
            if call is None:
                content += markup
            else:
                found.append(call)
            self._behind = call is not None

    def _end(self) -> int:
        """Where the end tag of the call stands that the held text begins with; -1 before it has come. One within a JSON
        string is part of an argument, if JSON it is: where a string never ends, the first tag was the call's end."""
        if not self._held.startswith(OPEN):
            return -1
        while (end := self._held.find(CLOSE, self._at)) >= 0:
            self._at = end + len(CLOSE)
            if self._first < 0:
                self._first = end
            try:
                json.loads(self._held[len(OPEN):end])
            except json.JSONDecodeError as error:
                if error.msg.startswith("Unterminated string"):
                    continue
                return self._first
            except (ValueError, RecursionError):
                return self._first
            return end
        self._at = max(self._at, len(self._held) - len(CLOSE) + 1)
        return -1

    def _split(self, end: int) -> str:
        """The call up to its end tag at ``end``; what is behind stays held."""
        markup, self._held = self._held[:end + len(CLOSE)], self._held[end + len(CLOSE):]
        self._at, self._first = len(OPEN), -1
        return markup

    def _between(self, content: str) -> str:
        """White space behind a call is markup too, however it is cut."""
        if self._behind:
            content = content.lstrip()
            self._behind = not content
        return content

    def _bare(self) -> tuple[str, list[Call]]:
        """An answer that begins with a brace may be a call as a whole; any other is content from the beginning on."""
        if not self._held.lstrip() or self._held.lstrip().startswith("{"):
            return "", []
        content, self._held = self._held, ""
        self._plan = None
        return content, []

    def finish(self) -> tuple[str, list[Call]]:
        """The end of the text: a call without its end tag counts, anything else that was held back is content."""
        held = self._held
        if self._plan is not None and held:
            body = held.removeprefix(OPEN) if self._plan.style == "tagged" else held
            if (self._plan.style == "bare" or held.startswith(OPEN)) and (call := self._read(body)) is not None:
                self._held = ""
                return "", [call]
            if self._first >= 0:  # a string that never ended hid its end tag
                content = self._split(self._first)
                self._behind = False
                more, found = self._tagged()
                last, others = self.finish()
                return content + more + last, found + others
            held = self._between(held)
        self._held = ""
        return held, []

    def _read(self, body: str) -> Call | None:
        """The call that a JSON text is; None when it is none of the known functions'."""
        assert self._plan is not None
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            return None
        key = ARGUMENTS[self._plan.style]
        if not isinstance(found, dict) or not isinstance(found.get(key), dict):
            return None
        if found.get("name") not in {tool.function.name for tool in self._plan.tools}:
            return None
        call = Call(f"call_{secrets.token_hex(12)}", found["name"], json.dumps(found[key], ensure_ascii=False))
        self.calls.append(call)
        return call


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``marker``."""
    return next((size for size in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-size:])), 0)
