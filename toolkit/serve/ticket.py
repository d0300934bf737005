"""One prompt at the engine, as the front end waits for it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Protocol

from engines.request import OWN_FAULTS
from toolkit.serve.faults import ApiError
from toolkit.serve.wire import Message


class Desk(Protocol):
    """Where tickets are opened and shut: ``client.EngineClient``."""

    def open(self, ticket: Ticket, message: Message) -> None: ...

    def shut(self, ticket: Ticket, *, finished: bool) -> None: ...


class Ticket:
    """One prompt under way. Use as ``async with``; ``take`` or iterate over its messages until all continuations are
    done. ``news`` is set when there is something to take; several tickets may share one."""

    def __init__(self, client: Desk, identity: int, message: Message, count: int,
                 news: asyncio.Event | None = None) -> None:
        self._client, self.identity = client, identity
        self._message, self._open = message, count
        self._inbox: deque[Message | ApiError] = deque()
        self._news = asyncio.Event() if news is None else news
        self.sent_at = 0.0

    async def __aenter__(self) -> Ticket:
        self._client.open(self, self._message)
        self.sent_at = time.monotonic()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        self._client.shut(self, finished=self.finished)

    @property
    def finished(self) -> bool:
        """Whether all continuations are done."""
        return self._open == 0

    def put(self, message: Message | ApiError) -> None:
        self._inbox.append(message)
        self._news.set()

    def put_token(self, index: int, token: int | None, text: str, logprob: list[Any] | None, finish: str | None,
                  error: str | None) -> None:
        """A token, or more text for the message that nobody has taken yet (tokens with log-probabilities stay single).
        """
        if logprob is None and self._inbox:
            last = self._inbox[-1]
            if isinstance(last, dict) and last["kind"] == "token" and last["index"] == index and (
                    last["logprob"] is None):
                last["text"] += text
                last["token"], last["finish"], last["error"] = token, finish, error
                return
        self.put({"kind": "token", "index": index, "token": token, "text": text, "logprob": logprob, "finish": finish,
                  "error": error})

    def take(self) -> Message | None:
        """The next message of kind ``token``, ``done`` or ``score``; None when there is none yet. ApiError when the
        engine refused or lost the prompt."""
        if not self._inbox:
            return None
        message = self._inbox.popleft()
        if isinstance(message, ApiError):
            raise message
        self._open -= message["kind"] in ("done", "score")
        return message

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages as they come."""
        while self._open:
            if (message := self.take()) is None:
                await self._news.wait()
                self._news.clear()
            else:
                yield message

    async def result(self) -> list[Message]:
        """The ends of all continuations, in order of their index; errors and deadlines are raised."""
        found = [message async for message in self if message["kind"] != "token"]
        for message in found:
            if (fault := ending_fault(message["finish"], message["error"])) is not None:
                raise fault
        return sorted(found, key=lambda message: message.get("index", 0))


def ending_fault(finish: str | None, error: str | None) -> ApiError | None:
    """The error that an ending is, if it is one."""
    if finish == "deadline":
        return ApiError(504, f"the request took too long: {error}", code="deadline")
    for begin, (code, _) in OWN_FAULTS.items():
        if finish == "error" and error is not None and error.startswith(begin):
            return ApiError(400, f"generation failed: {error}", code=code)
    if finish in ("error", "abort"):
        return ApiError(500, f"generation failed: {error or 'it was aborted'}", code="engine_fault")
    return None
