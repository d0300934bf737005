"""Requests as records. Every field is honoured or refused: an unknown one is an error that names it.

OpenAI's fields without effect here (``user``, ``metadata``, ``store`` false, ``service_tier`` auto or default) are
accepted at those values only. Extensions: ``ignore_eos``, ``top_k``, ``min_p``, ``min_tokens``, ``stop_token_ids``,
``bad_words``, ``repetition_penalty``, ``cache_salt``, ``priority``; ``response_format`` also takes {"type": "regex",
"regex": "..."}.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag

from calib.errors import shown
from engines.request import MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from toolkit.serve.faults import ApiError, bad
from toolkit.serve.options import ServeOptions
from toolkit.serve.parts import DEFAULTS, SETTLED, Part, bounded, listed, validated

Ids = Annotated[list[Annotated[int, Field(ge=0)]], SETTLED]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
#: Messages of a conversation, their parts and their tool calls, all together.
_MOST_PIECES = 8192


class StreamOptions(Part):
    include_usage: bool = False


class Sampled(Part):
    """What both generation endpoints share."""

    model: str
    n: int = Field(default=1, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    logit_bias: Annotated[dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], float], bounded(1024)] | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: Annotated[list[str], Field(max_length=16), SETTLED, BeforeValidator(listed)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0)
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: Ids = Field(default_factory=list, max_length=256)
    bad_words: Annotated[list[str], SETTLED] = Field(default_factory=list, max_length=32)
    ignore_eos: bool = False
    cache_salt: str = Field(default="", max_length=256)
    priority: int = Field(default=0, ge=-100, le=100)
    user: str | None = None
    metadata: Annotated[dict[str, str], bounded(16)] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    def check(self, options: ServeOptions) -> None:
        """The server's own limits, and fields that need each other."""
        if self.model != options.model:
            raise ApiError(404, f"model {shown(self.model, 200)} is not served here; this is {options.model!r}",
                           param="model", code="model_not_found")
        if self.n > options.max_n:
            raise bad(f"n is {self.n}; this server allows {options.max_n}", "n")
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options needs stream: true", "stream_options")
        if sum(map(len, self.stops)) > options.max_stop_chars:
            raise bad(f"the stop strings have more than {options.max_stop_chars} characters", "stop")

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    def params(self, *, max_tokens: int, logprobs: int | None, grammar: Grammar | None = None,
               stop: tuple[str, ...] = ()) -> SamplingParams:
        """As the engine takes them; an ApiError where they contradict each other."""
        given = {
            "n": self.n, "max_tokens": max_tokens, "min_tokens": self.min_tokens, "temperature": self.temperature,
            "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p, "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty, "repetition_penalty": self.repetition_penalty,
            "logit_bias": {int(index): bias for index, bias in (self.logit_bias or {}).items()}, "seed": self.seed,
            "stop": (*self.stops, *stop), "stop_token_ids": tuple(self.stop_token_ids), "ignore_eos": self.ignore_eos,
            "bad_words": tuple(self.bad_words), "logprobs": logprobs, "grammar": grammar}
        return validated(SamplingParams, {name: value for name, value in given.items() if value != DEFAULTS[name]})


class CompletionRequest(Sampled):
    """``POST /v1/completions``."""

    only_null = frozenset({"best_of", "suffix"})

    prompt: str | Annotated[list[str], SETTLED] | Ids | Annotated[list[Ids], SETTLED]
    max_tokens: int = Field(default=16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):  # validated: then all are
            return [self.prompt]
        return cast("list[str | list[int]]", self.prompt)

    def check(self, options: ServeOptions) -> None:
        super().check(options)
        if not 1 <= len(self.prompts) <= options.max_prompts:
            raise bad(f"{len(self.prompts)} prompts; this server allows 1 to {options.max_prompts}", "prompt")
        if self.max_tokens == 0 and not self.echo:
            raise bad("max_tokens is 0 and echo false: there is nothing to answer", "max_tokens")
        if self.echo and self.stream:
            raise bad("echo and stream exclude each other here", "echo")


class FunctionCall(Part):
    name: Name
    arguments: str = Field(max_length=1 << 20)


class ToolCall(Part):
    id: str = Field(max_length=128)
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(Part):
    type: Literal["text"]
    text: str


def _form(content: Any) -> str:
    return "list[]" if isinstance(content, list) else "constr"


#: Text, or parts of it. The tags are pydantic's names for the two, which ``refusal`` leaves out.
_Content = Annotated[Annotated[str, Tag("constr")] | Annotated[list[TextPart], SETTLED, Tag("list[]")],
                     Discriminator(_form)]


class Message(Part):
    """One message of a conversation. One that OpenAI's client was given goes in as it is, with its nulls."""

    only_null = frozenset({"annotations", "audio", "function_call"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128), SETTLED] | None = None
    tool_call_id: str | None = None
    refusal: None = None


def _few(messages: Any) -> Any:
    """A conversation that is not too long, looked at before its messages are."""
    if isinstance(messages, list):
        pieces = len(messages)
        for message in messages[:_MOST_PIECES]:
            if isinstance(message, dict):
                its = message.get("content"), message.get("tool_calls")
                pieces += sum(len(one) for one in its if isinstance(one, list))
        if pieces > _MOST_PIECES:
            raise ValueError(f"has {pieces} messages, parts and tool calls; at most {_MOST_PIECES} are allowed")
    return messages


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096), SETTLED, BeforeValidator(_few)]


class Function(Part):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool | None = None


class Tool(Part):
    type: Literal["function"]
    function: Function


class NamedFunction(Part):
    name: Name


class NamedTool(Part):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Part):
    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = None

    def grammar(self) -> Grammar | None:
        """What the answer must match; an ApiError when the field that says so is missing."""
        given = {"json_schema": self.json_schema is not None, "regex": self.regex is not None}
        if any(given[name] != (name == self.type) for name in given):
            raise bad(f"response_format {self.type} takes {'the field ' + self.type if self.type in given else 'no'} "
                      "other field", "response_format")
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema is not None else {"type": "object"}
        source = json.dumps(schema) if self.regex is None else self.regex
        if not 1 <= len(source) <= MAX_GRAMMAR_BYTES:
            raise bad(f"response_format {self.type} has {len(source)} characters; 1 to {MAX_GRAMMAR_BYTES} are allowed",
                      "response_format")
        return Grammar(kind="json_schema" if self.regex is None else "regex", source=source)


class ChatRequest(Sampled):
    """``POST /v1/chat/completions``."""

    only_null = frozenset({"audio", "function_call", "functions", "modalities", "prediction", "prompt_cache_key",
                           "prompt_cache_retention", "reasoning_effort", "safety_identifier", "verbosity",
                           "web_search_options"})

    messages: Messages
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128), SETTLED] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True

    def check(self, options: ServeOptions) -> None:
        super().check(options)
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise bad("max_tokens and max_completion_tokens differ", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad("top_logprobs needs logprobs: true", "top_logprobs")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise bad("tool_choice needs tools", "tool_choice")

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(Part):
    """``POST /tokenize``: a text, or a conversation under the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Part):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Ids = Field(max_length=1 << 20)
