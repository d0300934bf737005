"""OpenAI's completions and chat completions, whole and streamed."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from engines.request import SamplingParams
from toolkit.serve.faults import ApiError, bad
from toolkit.serve.protocol import ChatRequest, CompletionRequest
from toolkit.serve.service import Service, Usage
from toolkit.serve.tools import CallReader, Plan, plan_tools
from toolkit.serve.wire import Message

Document = dict[str, Any]


def _head(kind: str, name: str, model: str) -> Document:
    return {"id": f"{kind}-{secrets.token_hex(12)}", "object": name, "created": int(time.time()), "model": model}


_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class _Chunks:
    """Events of one stream: what all of them say is written once."""

    def __init__(self, head: Document, usage: bool) -> None:
        self._begin = _ENCODE(head)[:-1] + ',"choices":['
        self._end = '],"usage":null}' if usage else "]}"

    def of(self, choice: Document) -> str:
        return self._begin + _ENCODE(choice) + self._end

    def usage(self, usage: Usage) -> str:
        """The last one, without choices."""
        return f'{self._begin}],"usage":{_ENCODE(usage.document())}}}'


class Completions:
    """One ``/v1/completions`` request, admitted: prompts are tokenized and fit."""

    def __init__(self, service: Service, request: CompletionRequest, terms: Document, prompts: list[list[int]],
                 params: SamplingParams | None) -> None:
        self._service, self._request, self._terms = service, request, terms
        self._prompts, self._params = prompts, params
        self._head = _head("cmpl", "text_completion", request.model)

    @classmethod
    async def admit(cls, service: Service, request: CompletionRequest, caller: str) -> Completions:
        """Check everything that can be checked before the engine is asked. ApiError in words."""
        request.check(service.options)
        service.admit(len(request.prompts))
        prompts = [await service.texts.ids(prompt) for prompt in request.prompts]
        for prompt in prompts:
            service.texts.room(prompt, request.max_tokens, "max_tokens")
        rows = sum(map(len, prompts)) if request.echo and request.logprobs is not None else 0
        if rows > service.options.max_prompt_logprobs:
            raise bad(f"{rows} prompt tokens with log-probabilities; this server allows "
                      f"{service.options.max_prompt_logprobs} a request", "echo")
        params = None
        if request.max_tokens:
            params = request.params(max_tokens=request.max_tokens, logprobs=request.logprobs)
        return cls(service, request, service.terms(caller, request.cache_salt, request.priority), prompts, params)

    async def whole(self) -> Document:
        """The answer as one document."""
        usage = Usage()
        choices: list[Document] = []
        ends: list[list[Message]] = [[] for _ in self._prompts]
        if self._params is not None:
            ends = await self._service.generate(self._prompts, self._params, self._terms)
        elif self._request.logprobs is not None:
            self._service.check_room(1)  # (to be scored below, one after another)
        for prompt, its in zip(self._prompts, ends, strict=True):
            usage.add(len(prompt), its)
            echo = await self._echo(prompt) if self._request.echo else None
            answers: Sequence[Message | None] = its or [None] * self._request.n  # (max_tokens 0: the prompt alone)
            for end in answers:
                choices.append(self._choice(len(choices), prompt, end, echo))
        if not self._params:
            choices = [choice | {"finish_reason": "length"} for choice in choices]
        return self._head | {"choices": choices, "usage": usage.document()}

    async def _echo(self, prompt: list[int]) -> list[Any] | None:
        """The prompt's own log-probabilities (none of the first token), where they are asked for."""
        if self._request.logprobs is None:
            return None
        if len(prompt) == 1:
            return [None]
        return [None, *await self._service.score(prompt, self._request.logprobs, self._terms)]

    def _choice(self, index: int, prompt: list[int], end: Message | None, echo: list[Any] | None) -> Document:
        texts, request = self._service.texts, self._request
        text = "" if end is None else end["text"]
        tokens = [] if end is None else end["tokens"]
        logprobs = [] if end is None or end["logprobs"] is None else end["logprobs"]
        if request.echo:
            text = texts.tokenizer.decode(prompt) + text
            tokens, logprobs = [*prompt, *tokens], [*(echo or []), *logprobs]
        return {"index": index, "text": text, "finish_reason": None if end is None else end["finish"],
                "logprobs": None if request.logprobs is None else texts.completion_logprobs(
                    tokens, logprobs, request.logprobs, 0)}

    async def pieces(self) -> AsyncGenerator[str, None]:
        """The answer as events' data. Choice i x n + j is continuation j of prompt i."""
        assert self._params is not None
        asked = self._request.stream_options is not None and self._request.stream_options.include_usage
        chunks = _Chunks(self._head, asked)
        usage, lengths = Usage(), dict.fromkeys(range(len(self._prompts) * self._params.n), 0)
        ends: dict[int, list[Message]] = {number: [] for number in range(len(self._prompts))}
        async with contextlib.aclosing(self._service.stream(self._prompts, self._params, self._terms)) as stream:
            async for number, message in stream:
                index = number * self._params.n + message["index"]
                if message["kind"] == "done":
                    ends[number].append(message)
                    continue
                logprobs = None
                if self._request.logprobs is not None and message["token"] is not None:
                    logprobs = self._service.texts.completion_logprobs(
                        [message["token"]], [message["logprob"]], self._request.logprobs, lengths[index])
                lengths[index] += len(message["text"])
                if message["text"] or message["finish"] or logprobs:
                    yield chunks.of({"index": index, "text": message["text"], "logprobs": logprobs,
                                     "finish_reason": message["finish"]})
        for number, prompt in enumerate(self._prompts):
            usage.add(len(prompt), ends[number])
        if asked:
            yield chunks.usage(usage)


class Chat:
    """One ``/v1/chat/completions`` request, admitted."""

    def __init__(self, service: Service, request: ChatRequest, terms: Document, prompt: list[int],
                 params: SamplingParams, plan: Plan | None) -> None:
        self._service, self._request, self._terms = service, request, terms
        self._prompt, self._params, self._plan = prompt, params, plan
        self._head = _head("chatcmpl", "chat.completion", request.model)

    @classmethod
    async def admit(cls, service: Service, request: ChatRequest, caller: str) -> Chat:
        """Check everything that can be checked before the engine is asked. ApiError in words."""
        request.check(service.options)
        service.admit(1)
        tokenizer = service.texts.tokenizer
        if not tokenizer.has_template:
            raise bad("this model has no chat template; use /v1/completions", "messages")
        plan = plan_tools(request, tokenizer.template_source, tokenizer.takes_tools)
        grammar = request.response_format.grammar() if request.response_format is not None else None
        prompt = await service.texts.chat_ids(request.messages, None if plan is None else plan.tools)
        room = service.texts.room(prompt, request.limit, "max_completion_tokens")
        params = request.params(max_tokens=room, logprobs=(request.top_logprobs or 0) if request.logprobs else None,
                                grammar=grammar if plan is None else plan.grammar,
                                stop=() if plan is None else plan.stop)
        return cls(service, request, service.terms(caller, request.cache_salt, request.priority), prompt, params, plan)

    async def whole(self) -> Document:
        """The answer as one document."""
        async with self._naming():
            [ends] = await self._service.generate([self._prompt], self._params, self._terms)
        usage = Usage()
        usage.add(len(self._prompt), ends)
        return self._head | {"choices": [self._choice(index, end) for index, end in enumerate(ends)],
                             "usage": usage.document()}

    def _choice(self, index: int, end: Message) -> Document:
        reader = CallReader(self._plan)
        content = "".join(piece for piece, _ in (reader.push(end["text"]), reader.finish()))
        message: Document = {"role": "assistant", "content": content, "refusal": None}
        if reader.calls:
            message |= {"content": content or None, "tool_calls": [call.document() for call in reader.calls]}
        return {"index": index, "message": message, "logprobs": self._logprobs(end["tokens"], end["logprobs"]),
                "finish_reason": _reason(end["finish"], reader)}

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[Any] | None) -> Document | None:
        if logprobs is None:
            return None
        return {"content": [self._service.texts.chat_logprob(token, one, self._request.top_logprobs or 0)
                            for token, one in zip(tokens, logprobs, strict=True)], "refusal": None}

    async def pieces(self) -> AsyncGenerator[str, None]:
        """The answer as events' data: a role first, then content and calls, a reason last, and usage if asked."""
        chunks = _Chunks(self._head | {"object": "chat.completion.chunk"}, self._wants_usage)
        readers = [CallReader(self._plan) for _ in range(self._params.n)]
        counts = [itertools.count() for _ in readers]
        ends: list[Message] = []
        begun = False
        told = self._service.stream([self._prompt], self._params, self._terms)
        async with self._naming(), contextlib.aclosing(told) as stream:
            async for _, message in stream:
                if not begun:  # what the engine refuses is an error with a status, not an event
                    begun = True
                    for index in range(len(readers)):
                        yield _delta(chunks, index, {"role": "assistant", "content": "", "refusal": None})
                index = message["index"]
                if message["kind"] == "done":
                    ends.append(message)
                    continue
                reader = readers[index]
                content, calls = reader.push(message["text"])
                if message["finish"]:
                    more, late = reader.finish()
                    content, calls = content + more, calls + late
                logprobs = None
                if message["logprob"] is not None:
                    logprobs = self._logprobs([message["token"]], [message["logprob"]])
                if content or logprobs:
                    yield _delta(chunks, index, {"content": content}, logprobs=logprobs)
                for call in calls:
                    yield _delta(chunks, index, {"tool_calls": [{"index": next(counts[index])} | call.document()]})
                if message["finish"]:
                    yield _delta(chunks, index, {}, reason=_reason(message["finish"], reader))
        if self._wants_usage:
            usage = Usage()
            usage.add(len(self._prompt), ends)
            yield chunks.usage(usage)

    @contextlib.asynccontextmanager
    async def _naming(self) -> AsyncIterator[None]:
        """A grammar that cannot be used is an error of the parameter that it came from."""
        try:
            yield
        except ApiError as error:
            if error.code == "grammar" and error.param is None:
                error.param = "response_format" if self._plan is None else "tools"
            raise

    @property
    def _wants_usage(self) -> bool:
        return self._request.stream_options is not None and self._request.stream_options.include_usage


def _delta(chunks: _Chunks, index: int, delta: Document, *, logprobs: Document | None = None,
           reason: str | None = None) -> str:
    return chunks.of({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})


def _reason(finish: str, reader: CallReader) -> str:
    """``tool_calls`` when the model called; an answer that was cut off says so first."""
    return "tool_calls" if reader.calls and finish == "stop" else finish
