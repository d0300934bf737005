"""The engine process: ``python -m toolkit.serve.worker ENGINE FD``.

The main thread owns the loop: it takes what has come in, makes one step, and sends what came of it in one message. A
reader thread fills the inbox, so an abort is seen before the next step; a third one says twice a second how many steps
there were, so that the front end can tell a slow step from a dead process. The process ends when the connection does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calib.errors import ToolkitError
from engines.llm import LLM
from engines.request import SamplingParams, TokenLogprob
from engines.runtime.admission import Terms
from engines.runtime.events import TokenEvent
from engines.runtime.loop import Loop
from toolkit.serve import pauses
from toolkit.serve.wire import BEAT_S, FAULT, BlockingWire, Message

_LOG = logging.getLogger(__name__)
#: Ends in one message: the front end answers the first of many while the others are put together.
ENDS = 8


@dataclass(slots=True)
class Job:
    """One prompt of a request: its sequences by number, and how its front end wants to hear of it."""

    identity: int
    stream: bool
    numbers: dict[int, int] = field(default_factory=dict)
    score: bool = False


class Worker:
    """Serves one connection with one LLM."""

    def __init__(self, llm: LLM, wire: BlockingWire) -> None:
        self._llm, self._wire = llm, wire
        self._loop: Loop = llm.loop
        self._inbox: queue.SimpleQueue[list[Message]] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}
        self._of_number: dict[int, tuple[Job, int]] = {}
        self._open = True

    def run(self) -> None:
        """Serve until the connection ends."""
        self._wire.send(hello(self._llm))
        for target in (self._read, self._beat):
            threading.Thread(target=target, daemon=True).start()
        while self._open:
            self._take()
            if self._open and not self._loop.idle:
                self._step()

    def _read(self) -> None:
        try:
            while messages := self._wire.receive():
                if any(message["op"] == "dump" for message in messages):
                    self._dump()
                self._inbox.put(messages)  # as they came: prompts of one send are of one step
        except (OSError, ValueError):
            _LOG.exception("the connection broke")
        self._inbox.put([])

    def _beat(self) -> None:
        while self._open:
            time.sleep(BEAT_S)
            try:
                self._wire.send({"ev": "beat", "steps": self._loop.steps, "busy": not self._loop.idle})
            except OSError:
                return

    def _dump(self) -> None:
        """State of every sequence and all threads' stacks, on stderr; the loop may be at work beneath."""
        for _ in range(3):
            with contextlib.suppress(RuntimeError):  # a collection changed while it was read
                sys.stderr.write(f"engine state: {json.dumps([self._loop.stats(), *self._loop.describe()])}\n")
                break
        faulthandler.dump_traceback(all_threads=True)

    def _take(self) -> None:
        """Handle what came in; wait for it when there is nothing else to do."""
        while (messages := self._came()) is not None:
            if not messages:
                self._open = False
                return
            for message in messages:
                self._handle(message)

    def _came(self) -> list[Message] | None:
        """What came in next; None when there is nothing and the loop has work."""
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(self._loop.idle, pauses.AFTER_S)
        if not self._loop.idle:
            return None
        pauses.rest()
        return self._inbox.get()

    def _handle(self, message: Message) -> None:
        if message["op"] == "submit":
            self._submit(message)
        elif message["op"] == "abort":
            self._abort(message["id"])
        elif message["op"] == "stats":
            self._wire.send({"ev": "stats", "id": message["id"], **self._llm.stats()})
        elif message["op"] != "dump":  # the reader's
            raise ValueError(f"unknown message {message['op']!r}")

    def _submit(self, message: Message) -> None:
        job = Job(message["id"], message["stream"], score=message["score"] is not None)
        try:
            terms = Terms(**message["terms"])
            if job.score:
                job.numbers[0] = self._loop.admit_score(message["prompt"], message["score"], None, terms)
            else:
                params = SamplingParams.model_validate(message["params"])
                job.numbers |= enumerate(self._loop.admit_all(message["prompt"], params, terms))
        except ToolkitError as error:
            self._wire.send({"ev": "refused", "id": job.identity, "code": error.code, "message": error.message,
                             "hint": error.hint})
            return
        except Exception as error:  # one request's fault, whatever it is, is not the others'
            _LOG.exception("a prompt could not be admitted")
            self._wire.send({"ev": "refused", "id": job.identity, "code": FAULT, "hint": "",
                             "message": f"the engine could not take the request: {type(error).__name__}"})
            return
        self._jobs[job.identity] = job
        self._of_number |= {number: (job, index) for index, number in job.numbers.items()}

    def _abort(self, identity: int) -> None:
        """Idempotent: what has ended before is not known any more."""
        if (job := self._jobs.pop(identity, None)) is not None:
            self._drop(job)

    def _drop(self, job: Job) -> None:
        for number in job.numbers.values():
            self._loop.abort(number)
            self._of_number.pop(number, None)

    def _step(self) -> None:
        tokens: list[list[Any]] = []
        done: list[Message] = []
        scores: list[Message] = []
        for event in self._loop.step():
            if len(done) + len(scores) == ENDS:
                self._tell(tokens, done, scores)
                tokens, done, scores = [], [], []
            if event.number not in self._of_number:
                continue
            job, index = self._of_number[event.number]
            if job.stream and not job.score:
                tokens.append(token_message(job.identity, index, event))
            if event.finish_reason is not None:
                self._end(job, index, event, done, scores)
        if tokens or done or scores:
            self._tell(tokens, done, scores)

    def _tell(self, tokens: list[list[Any]], done: list[Message], scores: list[Message]) -> None:
        self._wire.send({"ev": "step", "steps": self._loop.steps, "tokens": tokens, "done": done, "scores": scores})

    def _end(self, job: Job, index: int, event: TokenEvent, done: list[Message], scores: list[Message]) -> None:
        del self._of_number[event.number]
        del job.numbers[index]
        if not job.numbers:
            self._jobs.pop(job.identity, None)
        if job.score:
            scores.append(self._score(job, event))
            return
        output = self._loop.take(event.number)
        its = output.outputs[0]
        done.append({"id": job.identity, "index": index, "finish": its.finish_reason, "error": its.error,
                     "text": None if job.stream else its.text, "generated": len(its.token_ids),
                     "tokens": None if job.stream else its.token_ids,
                     "logprobs": None if job.stream or its.logprobs is None else [plain(one) for one in its.logprobs],
                     "cached": output.cached_tokens, "ttft_s": output.ttft_s, "e2e_s": output.e2e_s,
                     "queue_s": output.queue_s})

    def _score(self, job: Job, event: TokenEvent) -> Message:
        try:
            score = self._loop.take_score(event.number)
        except ToolkitError as error:
            return {"id": job.identity, "finish": event.finish_reason, "error": error.message}
        top: list[list[list[float]]] = [[] for _ in score.logprobs]
        if score.top_ids is not None and score.top_logprobs is not None:
            top = [[[int(token), float(value)] for token, value in zip(ids, values, strict=True)]
                   for ids, values in zip(score.top_ids, score.top_logprobs, strict=True)]
        return {"id": job.identity, "finish": "length", "error": None,
                "logprobs": [[float(value), row] for value, row in zip(score.logprobs, top, strict=True)]}


def plain(logprob: TokenLogprob) -> list[Any]:
    return [logprob.logprob, [[token, value] for token, value in logprob.top.items()]]


def token_message(identity: int, index: int, event: TokenEvent) -> list[Any]:
    return [identity, index, event.token, event.text, None if event.logprob is None else plain(event.logprob),
            event.finish_reason, event.error]


def hello(llm: LLM) -> Message:
    """Who the engine is, for a front end that opens no engine itself."""
    engine, limits = llm.engine, llm.loop.limits
    return {"ev": "hello", "digest": engine.digest, "recipe": engine.recipe, "kv_cache": engine.kv.dtype,
            "device": engine.device, "numerics": llm.numerics, "checkpoint_digest": engine.checkpoint_digest,
            "emulated": engine.emulated, "vocab_size": engine.plan.model.vocab_size,
            "family": engine.plan.model.family, "limits": limits.model_dump(),
            "versions": engine.artifact.manifest.versions}


def main(engine: str, descriptor: str) -> None:
    """Load an engine and serve the connection at a file descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C for the whole group is the front end's to handle
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    # The loop's own stack, should it hold the interpreter's lock. Not other threads': the handler would read frames
    # that run on, which can end the process.
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    wire = BlockingWire(socket.socket(fileno=int(descriptor)))
    try:
        llm = LLM(Path(engine))
        llm.loop.warm_grammars()
    except ToolkitError as error:
        wire.send({"ev": "failed", "code": error.code, "message": error.message, "hint": error.hint})
        return
    pauses.begin()
    with llm:
        Worker(llm, wire).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
