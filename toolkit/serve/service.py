"""What both protocols stand on: the engine's tickets with this server's limits, callers and figures around them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from engines.request import SamplingParams
from toolkit.serve.client import EngineClient
from toolkit.serve.faults import STOPPING, ApiError, unavailable
from toolkit.serve.metrics import Metrics
from toolkit.serve.options import ServeOptions
from toolkit.serve.patience import Patience
from toolkit.serve.text import Texts
from toolkit.serve.ticket import Ticket, ending_fault
from toolkit.serve.wire import Message


@dataclass(slots=True)
class Usage:
    """Tokens of one request."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def add(self, prompt_tokens: int, ends: Sequence[Message]) -> None:
        self.prompt += prompt_tokens
        self.completion += sum(end["generated"] for end in ends)
        self.cached += ends[0]["cached"] if ends else 0

    def document(self) -> dict[str, Any]:
        return {"prompt_tokens": self.prompt, "completion_tokens": self.completion,
                "total_tokens": self.prompt + self.completion, "prompt_tokens_details": {"cached_tokens": self.cached}}


class Service:
    """One served engine."""

    def __init__(self, client: EngineClient, texts: Texts, options: ServeOptions, metrics: Metrics) -> None:
        self.client, self.texts, self.options, self.metrics = client, texts, options, metrics
        self.started = int(time.time())
        #: Set when no new request is taken.
        self.draining = False
        #: For bodies to come.
        self.patience = Patience(options.body_timeout_s)

    @property
    def trouble(self) -> str | None:
        """Why nothing new is served now; None when it is."""
        return STOPPING if self.draining else self.client.trouble

    def drain(self) -> None:
        """Take nothing new: not what asks from now on, nor what has not been sent to its end."""
        self.draining = True
        self.patience.end()

    def admit(self, prompts: int) -> None:
        """ApiError 503 or 429 unless that many prompts may come in now: asked before there is work with them."""
        if self.trouble is not None:
            raise unavailable(self.trouble)
        self.check_room(prompts)

    def check_room(self, prompts: int) -> None:
        """ApiError 429 unless that many tickets may be opened. Asked right before they are: while a request was
        tokenized, others came in."""
        room = self.client.info["limits"]["max_batch_size"] + self.options.max_queue
        if self.client.waiting_or_running + prompts > max(room, prompts):
            raise ApiError(429, f"{self.client.waiting_or_running} prompts are under way, and {room} are the most",
                           code="overloaded", headers={"Retry-After": "1"})

    def terms(self, caller: str, salt: str = "", priority: int = 0) -> dict[str, Any]:
        """A request's terms for the engine. The prefix cache is parted by caller, and then by the request's salt."""
        return {"salt": f"{caller}\0{salt}", "priority": priority, "deadline_s": self.options.request_timeout_s}

    async def generate(self, prompts: Sequence[list[int]], params: SamplingParams, terms: dict[str, Any]
                       ) -> list[list[Message]]:
        """The ends of all continuations of all prompts, in order. The first fault ends the others."""
        self.check_room(len(prompts))
        async with AsyncExitStack() as stack:
            live = [await stack.enter_async_context(self.client.ticket(prompt, params, terms)) for prompt in prompts]
            if len(live) == 1:  # a group and a task of its own cost what the request's JSON costs
                return [await self._ends(live[0], prompts[0])]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ends(ticket, prompt))
                         for ticket, prompt in zip(live, prompts, strict=True)]
            return [task.result() for task in tasks]

    async def _ends(self, ticket: Ticket, prompt: list[int]) -> list[Message]:
        ends = await ticket.result()
        self.client.shut(ticket, finished=True)  # its place is free, though others of the request may go on
        self.metrics.finished(len(prompt), ends)
        return ends

    async def score(self, prompt: list[int], top: int, terms: dict[str, Any]) -> list[list[Any]]:
        """[log-probability, [[id, log-probability], ...]] of the prompt's tokens 1..n-1."""
        async with self.client.ticket(prompt, None, terms, score=top) as ticket:
            [message] = await ticket.result()
        return message["logprobs"]

    async def stream(self, prompts: Sequence[list[int]], params: SamplingParams, terms: dict[str, Any]
                     ) -> AsyncGenerator[tuple[int, Message], None]:
        """(prompt's number, message) of kinds ``token`` and ``done``, as they come. Leaving it early aborts all."""
        news = asyncio.Event()
        self.check_room(len(prompts))
        async with AsyncExitStack() as stack:
            live = {number: await stack.enter_async_context(
                self.client.ticket(prompt, params, terms, stream=True, news=news))
                for number, prompt in enumerate(prompts)}
            ends: dict[int, list[Message]] = {number: [] for number in live}
            while live:
                await news.wait()
                news.clear()
                for number, ticket in list(live.items()):
                    while (message := ticket.take()) is not None:
                        if (fault := ending_fault(message["finish"], message["error"])) is not None:
                            raise fault
                        ends[number] += [message] if message["kind"] == "done" else []
                        yield number, message
                    if ticket.finished:
                        del live[number]
                        self.metrics.finished(len(prompts[number]), ends[number])


def first_fault(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended a group of tasks: an ApiError if there is one."""
    found = [error for error in group.exceptions if isinstance(error, ApiError)]
    return found[0] if found else group.exceptions[0]
