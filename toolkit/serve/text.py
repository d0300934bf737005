"""From requests to token ids, and from tokens to what an answer shows of them.

All tokenizing is ``calib.text.Tokenizer``'s: its one BOS rule for plain prompts, the template's own for conversations.
Long texts are tokenized in a thread, so that the event loop goes on.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from calib.errors import CalibError
from calib.text import Tokenizer
from toolkit.serve.faults import ApiError, bad
from toolkit.serve.protocol import Message, Tool

_SHORT = 2000
T = TypeVar("T")
#: OpenAI's stand-in for minus infinity, which JSON has not.
_LEAST = -9999.0


class Texts:
    """One model's texts. ``longest`` is the most tokens of a sequence."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, longest: int) -> None:
        self.tokenizer, self._vocab_size, self.longest = tokenizer, vocab_size, longest
        tokenizer.least_tokens("")  # looks through the vocabulary once: before the first request

    async def ids(self, prompt: str | list[int], *, bos: bool = True, any_length: bool = False) -> list[int]:
        """Token ids of a prompt. ApiError 400 for what has no UTF-8 form, ids outside the vocabulary, or nothing, and
        without ``any_length`` for a text that no sequence can hold: it is not tokenized first."""
        if isinstance(prompt, str):
            if not any_length and len(prompt) > self.longest and (
                    least := self.tokenizer.least_tokens(prompt)) > self.longest:
                raise bad(f"the prompt has {len(prompt)} characters, which are {least} tokens or more; this engine's "
                          f"max_seq_len is {self.longest}", "prompt", "context_length_exceeded")
            ids = await self._off_loop(len(prompt), lambda: self._encode(prompt, bos))
        else:
            ids = list(prompt)
            if ids and (min(ids) < 0 or max(ids) >= self._vocab_size):
                strange = next(index for index in ids if not 0 <= index < self._vocab_size)
                raise bad(f"token id {strange} is outside the vocabulary of {self._vocab_size}", "prompt")
        if not ids:
            raise bad("the prompt is empty: 0 tokens", "prompt")
        return ids

    def _encode(self, text: str, bos: bool) -> list[int]:
        return self.tokenizer.encode(checked(text, "prompt"), bos=bos)

    async def chat_ids(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[int]:
        """Token ids of a conversation under the model's template. ApiError 400 in the template's words."""
        plain = [message_dict(message) for message in messages]
        described = None if not tools else [
            {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}
            for tool in tools]
        checked(json.dumps([plain, described], ensure_ascii=False), "messages")
        try:
            return await asyncio.to_thread(self.tokenizer.chat, plain, tools=described)
        except CalibError as error:
            raise bad(f"{error.message} ({error.hint})", "messages") from error

    async def decode(self, ids: list[int]) -> str:
        """The text of token ids, special ones too."""
        return await self._off_loop(len(ids), lambda: self.tokenizer.decode(ids, skip_special=False))

    @staticmethod
    async def _off_loop(size: int, work: Callable[[], T]) -> T:
        """Short work at once: a thread of the pool may be long in coming."""
        return work() if size < _SHORT else await asyncio.to_thread(work)

    def room(self, prompt: Sequence[int], asked: int | None, param: str) -> int:
        """max_tokens, or what is left of the longest sequence. ApiError 400 with the numbers when that is not enough.
        """
        left = self.longest - len(prompt)
        if left < (1 if asked is None else asked):
            raise bad(f"{len(prompt)} prompt tokens + {1 if asked is None else asked} {param} exceed this engine's "
                      f"max_seq_len of {self.longest}", param, "context_length_exceeded")
        return left if asked is None else asked

    def token_text(self, index: int) -> str:
        """How a token is named: its text, or ``bytes:\\xe2\\x82`` when it is a piece of a character."""
        data = self.tokenizer.id_to_bytes(index)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def chat_logprob(self, token: int, logprob: list[Any], top: int) -> dict[str, Any]:
        """An entry of ``logprobs.content``. ``logprob`` is [value, [[id, value], ...]] as the engine says it."""
        value, best = logprob
        return self._entry(token, value) | {"top_logprobs": [self._entry(*pair) for pair in best[:top]]}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self.token_text(token), "logprob": finite(value),
                "bytes": list(self.tokenizer.id_to_bytes(token))}

    def completion_logprobs(self, tokens: Sequence[int], logprobs: Sequence[list[Any] | None], top: int, offset: int
                            ) -> dict[str, Any]:
        """The ``logprobs`` of a completion (or of a piece of one), its text beginning at ``offset``."""
        names = [self.token_text(token) for token in tokens]
        offsets, decoder = [], codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            offsets.append(offset)
            shown = b"" if token in self.tokenizer.special_ids else self.tokenizer.id_to_bytes(token)
            offset += len(decoder.decode(shown))
        return {"tokens": names, "text_offset": offsets,
                "token_logprobs": [None if one is None else finite(one[0]) for one in logprobs],
                "top_logprobs": [None if one is None else self._tops(token, one, top)
                                 for token, one in zip(tokens, logprobs, strict=True)] if top else None}

    def _tops(self, token: int, logprob: list[Any], top: int) -> dict[str, float]:
        """The best tokens by name; the chosen one is always among them."""
        value, best = logprob
        named: dict[str, float] = {}
        for index, its in ((token, value), *best[:top]):
            name = self.token_text(index)
            named[name] = max(finite(its), named.get(name, _LEAST))  # (two tokens may have one name)
        return named


def finite(value: float) -> float:
    return value if value > _LEAST else _LEAST


def checked(text: str, param: str) -> str:
    """The text, unless JSON escapes put half a surrogate pair into it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad(f"{param} holds a lone surrogate, which is no character", param) from error
    return text


def message_dict(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it: joined text parts, and tool calls with their arguments as an object."""
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if message.content is not None:
        plain["content"] = message.content if isinstance(message.content, str) else "".join(
            part.text for part in message.content)
    for key in ("name", "tool_call_id"):
        if (value := getattr(message, key)) is not None:
            plain[key] = value
    if message.tool_calls:
        plain["tool_calls"] = [{"id": call.id, "type": "function", "function": {
            "name": call.function.name, "arguments": _arguments(call.function.arguments)}}
            for call in message.tool_calls]
    return plain


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_an_object() from error
    if not isinstance(found, dict):
        raise _not_an_object()
    return found


def _not_an_object() -> ApiError:
    return bad("a tool call's arguments are not a JSON object", "messages")
