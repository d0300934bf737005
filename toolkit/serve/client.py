"""The front end's side of the engine process: tickets for prompts, aborts, and the watchdog.

A ``Ticket`` is one prompt's way through the engine. Its owner reads it to the end or leaves its ``with`` block before
(by an error too), and then the engine is told to abort; what has ended is not, so a normal end costs no message. Every
ticket ends: with its last token, a typed error, or the engine's own end.

**Who is behind catches up.** What a reader has not taken yet of one continuation is one message: its text grows. So a
front end with more streams than it can write to at every step writes less often, not later and later, and a client that
does not read costs no memory but its text.

**Watchdog.** While tickets are open, the engine's step counter must move every ``watchdog_s`` seconds, and always must
its process say something in that time. When it does not, the engine writes its state and all stacks to its log, every
ticket fails, and health is 503 until the engine is seen to be well: it makes steps again, or answers a question that
was asked since and has nothing to do. The time is counted in looks of the front end: one that was held up for long
itself has looked once. A process that has ended fails every ticket at once, for good; the server then ends too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from calib.errors import ENVIRONMENT, ToolkitError
from engines.request import SamplingParams
from toolkit.serve import pauses
from toolkit.serve.faults import ApiError, bad, unavailable
from toolkit.serve.ticket import Ticket
from toolkit.serve.wire import BEAT_S, FAULT, AsyncWire, Message

_LOG = logging.getLogger(__name__)
_GENTLY_S = 10.0
#: Beats that must be missing, however short the watchdog: a single one is late on a busy machine.
_BEATS = 4


class EngineProcessError(ToolkitError):
    """The engine process could not start or has ended."""

    code = "engine_process"
    exit_code = ENVIRONMENT


class EngineClient:
    """One engine process. ``start`` before anything else, ``close`` last."""

    def __init__(self, engine: Path, watchdog_s: float) -> None:
        self._engine, self._watchdog_s = engine, watchdog_s
        self._tickets: dict[int, Ticket] = {}
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._numbers = itertools.count(1)
        self._steps = -1
        self._watch_s = min(0.5, watchdog_s / 4)
        #: Looks since the steps moved, and since the process said anything.
        self._still, self._silent = 0, 0
        #: The question that tells, after the watchdog tripped, that the engine is well again.
        self._question: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._wire: AsyncWire | None = None
        self._process: subprocess.Popen[bytes] | None = None
        #: What the engine says of itself.
        self.info: Message = {}
        #: Why it cannot serve now; None when it can.
        self.trouble: str | None = "the engine is loading"
        #: Set when the process has ended.
        self.ended = asyncio.Event()

    async def start(self) -> None:
        """Start the process and wait until its weights are loaded. EngineProcessError in the engine's own words."""
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "toolkit.serve.worker", str(self._engine), str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
        theirs.close()
        self._wire = await AsyncWire.over(ours)
        first = await self._wire.receive()
        if first is None or first["ev"] != "hello":
            await self._reap()
            if first is None:
                raise EngineProcessError(f"the engine process ended with code {self._process.returncode}",
                                         "Its messages stand above.")
            raise EngineProcessError(first["message"], first["hint"])
        self.info, self.trouble = first, None
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def waiting_or_running(self) -> int:
        return len(self._tickets)

    def ticket(self, prompt: list[int], params: SamplingParams | None, terms: dict[str, Any], *, stream: bool = False,
               score: int | None = None, news: asyncio.Event | None = None) -> Ticket:
        """A prompt to generate from, or with ``score`` (how many best tokens of every row) to score."""
        identity = next(self._numbers)
        message = {"op": "submit", "id": identity, "prompt": prompt, "terms": terms, "stream": stream, "score": score,
                   "params": None if params is None else params.model_dump(mode="json", exclude_defaults=True)}
        return Ticket(self, identity, message, 1 if params is None else params.n, news)

    def open(self, ticket: Ticket, message: Message) -> None:
        if self.trouble is not None or self._wire is None:
            raise unavailable(self.trouble or "the engine is not started")
        if not self._tickets:
            self._still = 0
        self._tickets[ticket.identity] = ticket
        self._wire.send(message)

    def shut(self, ticket: Ticket, *, finished: bool) -> None:
        """Forget a ticket; the engine aborts what it has not finished."""
        known = self._tickets.pop(ticket.identity, None) is not None
        if not self._tickets:
            asyncio.get_running_loop().call_later(pauses.AFTER_S, self._rest)
        if known and not finished and self._wire is not None and not self.ended.is_set():
            self._wire.send({"op": "abort", "id": ticket.identity})

    def _rest(self) -> None:
        if not self._tickets:
            pauses.rest()

    async def stats(self, patience_s: float = 2.0) -> Message | None:
        """The loop's counts now; None when the engine does not answer."""
        if self._wire is None or self.ended.is_set():
            return None
        identity = next(self._numbers)
        future = self._asked[identity] = asyncio.get_running_loop().create_future()
        self._wire.send({"op": "stats", "id": identity})
        try:
            return await asyncio.wait_for(future, patience_s)
        except TimeoutError:
            return None
        finally:
            del self._asked[identity]

    def fail_all(self, error: ApiError) -> None:
        """End every ticket with an error; their owners tell the engine to abort."""
        for ticket in list(self._tickets.values()):
            ticket.put(error)

    async def _listen(self) -> None:
        assert self._wire is not None
        while (message := await self._wire.receive()) is not None:
            self._dispatch(message)
        self.ended.set()
        self.trouble = "the engine process has ended"
        _LOG.error("the engine process has ended; %d requests fail", len(self._tickets))
        self.fail_all(unavailable(self.trouble))

    def _dispatch(self, message: Message) -> None:
        kind = message["ev"]
        self._silent = 0
        if kind in ("step", "beat") and message["steps"] != self._steps:
            self._steps, self._still = message["steps"], 0
            self._well("the engine makes steps again")
        if kind == "beat":
            self._ask_how_it_is()
        elif kind == "step":
            self._deliver(message)
        elif kind == "refused":
            if (ticket := self._tickets.get(message["id"])) is not None:
                words = message["message"] + (f" ({message['hint']})" if message["hint"] else "")
                fault = message["code"] == FAULT
                ticket.put(ApiError(500, words, code=FAULT) if fault else bad(words, code=message["code"]))
        elif kind == "stats":
            self._answered(message)

    def _deliver(self, message: Message) -> None:
        for identity, index, token, text, logprob, finish, error in message["tokens"]:
            if (ticket := self._tickets.get(identity)) is not None:
                ticket.put_token(index, token, text, logprob, finish, error)
        for kind, entries in (("done", message["done"]), ("score", message["scores"])):
            for entry in entries:
                if (ticket := self._tickets.get(entry["id"])) is not None:
                    ticket.put({"kind": kind, **entry})

    def _answered(self, message: Message) -> None:
        if message["id"] == self._question:
            self._question = None
            if not message["running"] and not message["waiting"]:
                self._well("the engine answers again and has nothing to do")
        elif (future := self._asked.get(message["id"])) is not None and not future.done():
            future.set_result(message)

    def _ask_how_it_is(self) -> None:
        """In trouble: ask the engine's loop, once. Its beats come from another thread and say nothing of it; and where
        all that it had was aborted, no step will ever tell."""
        if self.trouble is not None and self._question is None and self._wire is not None:
            self._question = next(self._numbers)
            self._wire.send({"op": "stats", "id": self._question})

    def _well(self, why: str) -> None:
        if self.trouble is not None and not self.ended.is_set():
            _LOG.warning(why)
            self.trouble = self._question = None
            self._still = 0

    async def _watch(self) -> None:
        while not self.ended.is_set():
            await asyncio.sleep(self._watch_s)
            self._look()

    def _look(self) -> None:
        """Count one more look at an engine that has not moved and said nothing since the last one."""
        self._still = self._still + 1 if self._tickets else 0
        self._silent += 1
        if self.trouble is not None:
            return
        if (still := self._still * self._watch_s) > self._watchdog_s:
            self._trip(f"the engine has made no step for {still:.0f} s")
        elif (silent := self._silent * self._watch_s) > max(self._watchdog_s, _BEATS * BEAT_S):
            self._trip(f"the engine has said nothing for {silent:.0f} s")

    def _trip(self, trouble: str) -> None:
        self.trouble = trouble
        _LOG.error("%s; %d requests fail: %s", trouble, len(self._tickets), sorted(self._tickets))
        assert self._wire is not None
        self._wire.send({"op": "dump"})
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)
        self.fail_all(unavailable(trouble))

    async def close(self) -> None:
        """End the process: by closing the connection, then by signals."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.ended.set()
        if self._wire is not None:
            await self._wire.close()
        await self._reap()

    async def _reap(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, _GENTLY_S)
            return
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
