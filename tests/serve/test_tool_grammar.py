"""Grammars of tool calls, as llguidance reads them: what a model could write, byte by byte."""

from __future__ import annotations

import enum
import json
from typing import Any

import pydantic
import pytest

from engines.request import Grammar
from toolkit.serve.faults import ApiError
from toolkit.serve.parts import validated
from toolkit.serve.protocol import ChatRequest, Tool
from toolkit.serve.tool_grammar import grammar_of
from toolkit.serve.tools import CallReader, Plan, plan_tools

llguidance = pytest.importorskip("llguidance")
#: What pydantic makes of a model with an enum and a nested model.
PAINT = {"$defs": {"Color": {"enum": ["red", "blue"], "type": "string"},
                   "Spot": {"type": "object", "properties": {"color": {"$ref": "#/$defs/Color"}}, "required": ["color"],
                            "additionalProperties": False}},
         "type": "object", "properties": {"spot": {"$ref": "#/$defs/Spot"}}, "required": ["spot"],
         "additionalProperties": False}
GOOD = {"spot": {"color": "red"}}


def tool(name: str = "paint", parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": PAINT if parameters is None else parameters}
    return {"type": "function", "function": function | more}


def tools(*found: dict[str, Any]) -> list[Tool]:
    return [validated(Tool, each) for each in found]


def writes(grammar: Grammar, text: str) -> bool:
    """Whether a model under the grammar can write exactly this."""
    source = (llguidance.LLMatcher.grammar_from_json_schema(grammar.source) if grammar.kind == "json_schema" else
              llguidance.LLMatcher.grammar_from_lark(grammar.source))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.try_consume_tokens([byte]) for byte in text.encode()) and matcher.is_accepting()


def tagged(arguments: Any, name: str = "paint") -> str:
    return f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call>'


def bare(arguments: Any, name: str = "paint") -> str:
    return json.dumps({"name": name, "parameters": arguments})


@pytest.mark.parametrize(("style", "call"), [("tagged", tagged), ("bare", bare)])
def test_references_within_a_function_are_its_own(style, call) -> None:
    """They count from the function's schema, not from the one that all calls share."""
    other = {"$defs": {"Color": {"const": "green"}}, "type": "object", "properties": {"c": {"$ref": "#/$defs/Color"}},
             "required": ["c"], "additionalProperties": False}
    grammar = grammar_of(tools(tool(), tool("other", other)), style, many=False)
    assert writes(grammar, call(GOOD))
    assert writes(grammar, call({"c": "green"}, "other"))
    assert not writes(grammar, call({"spot": {"color": "green"}}))
    assert not writes(grammar, call({"c": "red"}, "other"))
    assert not writes(grammar, call(GOOD, "nobody"))


def test_what_is_data_in_a_schema_stays_as_it_is() -> None:
    odd = {"type": "object", "properties": {"const": {"$ref": "#/$defs/X"}, "$ref": {"const": {"$ref": "#/a"}}},
           "$defs": {"X": {"const": 1}}, "required": ["const", "$ref"], "additionalProperties": False}
    assert writes(grammar_of(tools(tool(parameters=odd)), "tagged", many=False),
                  tagged({"const": 1, "$ref": {"$ref": "#/a"}}))


@pytest.mark.parametrize("parameters", [
    {"$id": "http://x/y", "$defs": {"Q": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/Q"}}},
    {"$defs": {"Q": {"$anchor": "q", "type": "integer"}}, "properties": {"a": {"$ref": "#q"}}}], ids=["id", "anchor"])
def test_references_that_do_not_count_from_the_root_stay(parameters) -> None:
    grammar = grammar_of(tools(tool(parameters=parameters | {"type": "object"})), "tagged", many=False)
    assert writes(grammar, tagged({"a": 1}))
    assert not writes(grammar, tagged({"a": "b"}))


def test_schemas_that_make_too_large_a_grammar_are_refused_by_their_name() -> None:
    wide = {"type": "object", "properties": {f"p{n:05}": {"type": "integer"} for n in range(3000)}}
    with pytest.raises(ApiError, match="make a grammar of") as error:
        grammar_of(tools(tool(parameters=wide)), "tagged", many=False)
    assert error.value.param == "tools"


@pytest.mark.parametrize("parameters", [{}, {"properties": {"a": {"type": "integer"}}}, {"$ref": "#/$defs/A", "$defs": {
    "A": {"type": "object", "properties": {"a": {"type": "integer"}}}}}, {"anyOf": [{"type": "object"},
                                                                                    {"type": "string"}]}],
    ids=["nothing", "no type", "reference", "any of"])
def test_arguments_are_an_object_whatever_the_schema_leaves_out(parameters) -> None:
    grammar = grammar_of(tools(tool(parameters=parameters)), "tagged", many=False)
    assert writes(grammar, tagged({"a": 1}))
    assert not writes(grammar, tagged("words"))


def test_arguments_of_another_type_are_refused() -> None:
    with pytest.raises(ApiError, match="'paint' have the type 'array'"):
        grammar_of(tools(tool(parameters={"type": "array"})), "tagged", many=False)


def test_one_call_or_many() -> None:
    two = f"{tagged(GOOD)}\n{tagged(GOOD)}"
    assert writes(grammar_of(tools(tool()), "tagged", many=True), two)
    assert not writes(grammar_of(tools(tool()), "tagged", many=False), two)


@pytest.mark.parametrize(("style", "call"), [("tagged", tagged), ("bare", bare)])
def test_strict_functions_are_enforced_where_a_call_is_the_models_choice(style, call) -> None:
    """The openai SDK's ``pydantic_function_tool`` always says strict; tool_choice is mostly auto."""
    asked = validated(ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "a"}],
                                    "tools": [tool(strict=True), tool("loose", {"type": "object"})]})
    plan = plan_tools(asked, "<tool_call>" if style == "tagged" else '"name" "parameters"', True)
    assert plan is not None
    assert plan.grammar is not None
    for text in ("", "No call is needed, 1 < 2.", "see <tool_cal", call(GOOD), call({"what": ["ever"]}, "loose")):
        assert writes(plan.grammar, text), text
    assert not writes(plan.grammar, call({"spot": {"color": "green"}}))
    assert not writes(plan.grammar, call({}, "nobody"))
    if style == "tagged":
        assert writes(plan.grammar, f"I paint.\n{tagged(GOOD)}\n{tagged(GOOD)}")
    reader = CallReader(Plan(tuple(asked.tools), style))
    reader.push(call(GOOD))
    reader.finish()
    assert [json.loads(found.arguments) for found in reader.calls] == [GOOD]


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "Paint"}}])
def test_the_openai_sdks_own_helper_is_understood(choice) -> None:
    """An enum and a nested model, as ``pydantic_function_tool`` sends them: strict, with references."""
    openai = pytest.importorskip("openai")

    class Color(enum.Enum):
        red = "red"
        blue = "blue"

    class Spot(pydantic.BaseModel):
        color: Color

    class Paint(pydantic.BaseModel):
        spot: Spot

    asked = validated(ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "a"}], "tool_choice": choice,
                                    "tools": [openai.pydantic_function_tool(Paint)]})
    plan = plan_tools(asked, "<tool_call>", True)
    assert plan is not None
    assert plan.grammar is not None
    assert writes(plan.grammar, tagged(GOOD, "Paint"))
    assert not writes(plan.grammar, tagged({"spot": {"color": "green"}}, "Paint"))
