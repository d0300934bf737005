"""Bursts: who is served while others are looked at, how many ends are told, when garbage is collected."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import selectors
import signal
import socket
import weakref
from collections.abc import AsyncGenerator

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engines.llm import LLM
from toolkit.serve import pauses
from toolkit.serve.answers import EventStream, while_there
from toolkit.serve.direct import Direct
from toolkit.serve.faults import ApiError
from toolkit.serve.turns import AT_ONCE, FewAtOnce, new_loop
from toolkit.serve.wire import BlockingWire
from toolkit.serve.worker import ENDS, Worker


def test_a_turn_looks_at_a_few_ready_sockets_and_all_have_theirs() -> None:
    turns: list[int] = [0]

    async def run() -> int:
        loop = asyncio.get_running_loop()
        pairs = [socket.socketpair() for _ in range(3 * AT_ONCE)]
        left = len(pairs)
        all_seen = loop.create_future()

        def seen(end: socket.socket) -> None:
            nonlocal left
            end.recv(10)
            left -= 1
            turns[-1] += 1
            if not left:
                all_seen.set_result(None)

        def turn() -> None:
            turns.append(0)
            if left:
                loop.call_soon(turn)
        for ours, theirs in pairs:
            theirs.send(b"request")
            loop.add_reader(ours, seen, ours)
        loop.call_soon(turn)
        await asyncio.wait_for(all_seen, 10)
        for ours, theirs in pairs:
            loop.remove_reader(ours)
            ours.close()
            theirs.close()
        return left
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(run()) == 0
    assert max(turns) <= AT_ONCE
    assert sum(turns) == 3 * AT_ONCE


def test_what_is_closed_or_changed_before_its_turn_is_not_given_out_as_it_was() -> None:
    selector = FewAtOnce()
    pairs = [socket.socketpair() for _ in range(AT_ONCE + 3)]
    for number, (ours, theirs) in enumerate(pairs):
        theirs.send(b"request")
        selector.register(ours.fileno(), selectors.EVENT_READ, number)
    first = {key.data for key, _ in selector.select(1)}
    assert len(first) == AT_ONCE
    closed, changed, same = [number for number in range(len(pairs)) if number not in first]
    selector.unregister(pairs[closed][0].fileno())
    selector.modify(pairs[changed][0].fileno(), selectors.EVENT_READ, "new")
    assert [key.data for key, _ in selector.select(1)] == [same]
    found: set[object] = set()
    while "new" not in found:  # it is still ready
        found |= {key.data for key, _ in selector.select(1)}
    assert closed not in found
    selector.close()
    for pair in pairs:
        for end in pair:
            end.close()


@pytest.fixture(scope="module")
def narrow(serve):
    """A server without a queue: 8 prompts, and not one more."""
    return serve("--max-queue", "0")


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.mark.parametrize(("path", "body", "places"), [
    ("/v1/chat/completions", CHAT, 8), ("/v1/chat/completions", CHAT | {"stream": True}, 8),
    ("/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 2}, 4)])
def test_a_burst_does_not_pass_the_queue_before_its_first_is_in(narrow, path: str, body: dict, places: int) -> None:
    """Conversations are tokenized in threads, and the prompts of a list ask in turn: all are looked at before."""
    many = 3 * places

    async def ask() -> list[int]:
        refused = asyncio.Semaphore(0)

        async def one(client: httpx.AsyncClient) -> int:
            answer = await client.post(narrow.url + path, json=body)
            if answer.status_code != 200:
                refused.release()
            return answer.status_code
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            os.kill(narrow.engine_process, signal.SIGSTOP)  # nothing ends while the others ask
            try:
                asking = [asyncio.ensure_future(one(client)) for _ in range(many)]
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(10):
                        for _ in range(many - places):
                            await refused.acquire()
            finally:
                os.kill(narrow.engine_process, signal.SIGCONT)
            return [await its for its in asking]
    found = asyncio.run(ask())
    assert (found.count(200), found.count(429)) == (places, many - places)
    assert narrow.metric("toolkit_requests_running") == 0


class Client:
    """A request whose client stays until it ``leaves``."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.request = Request({"type": "http"}, self._receive)
        self.gone = 0

    async def _receive(self) -> dict[str, str]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    def count(self) -> None:
        self.gone += 1


def test_a_request_begins_in_its_own_turn_and_its_answer_is_given() -> None:
    async def run() -> None:
        client, begun = Client(), []

        async def work() -> Response:
            begun.append(True)
            await asyncio.sleep(0.01)
            client.leaves.set()  # too late to matter
            return Response("all")
        waiting = while_there(client.request, work(), client.count)
        waiting.send(None)  # as the event loop would, once
        assert begun == [True]
        waiting.close()
        client = Client()
        answer = await while_there(client.request, work(), client.count)
        await asyncio.sleep(0.01)
        assert (answer.body, client.gone) == (b"all", 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
    asyncio.run(run())


def test_who_leaves_ends_the_work_and_only_that() -> None:
    async def run() -> None:
        client, ended = Client(), []

        async def work() -> Response:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                ended.append(True)
                raise
            return Response("never")
        asyncio.get_running_loop().call_later(0.01, client.leaves.set)
        answer = await while_there(client.request, work(), client.count)
        assert (answer.status_code, client.gone, ended) == (499, 1, [True])
        await asyncio.sleep(0)  # the request's task itself goes on
        task = asyncio.ensure_future(while_there(client.request, work(), client.count))
        client.leaves.clear()
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):  # from outside: not the client's doing
            await task
        assert (client.gone, ended) == (1, [True, True])
    asyncio.run(run())


def test_many_ends_of_one_step_are_told_a_few_at_a_time(tiny_engine) -> None:
    ours, theirs = socket.socketpair()
    count = 2 * ENDS + 1
    with LLM(tiny_engine) as llm, ours, theirs:
        worker, wire = Worker(llm, BlockingWire(theirs)), BlockingWire(ours)
        for identity in range(count):
            worker._submit({"id": identity, "stream": identity % 2 == 0, "score": None, "terms": {},
                            "prompt": [identity + 5], "params": {"max_tokens": 2, "ignore_eos": True}})
        while not llm.loop.idle:
            worker._step()
        theirs.shutdown(socket.SHUT_WR)
        said = []
        while messages := wire.receive():
            said += messages
    assert max(len(message["done"]) for message in said) <= ENDS
    assert sorted(end["id"] for message in said for end in message["done"]) == list(range(count))
    told: set[int] = set()
    for message in said:  # an end is never told before its last token
        told |= {identity for identity, *_, finish, _ in message["tokens"] if finish}
        assert {end["id"] for end in message["done"] if end["id"] % 2 == 0} <= told


def test_garbage_is_collected_at_rest_when_it_is_due(monkeypatch) -> None:
    collected: list[bool] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(True))
    for count, times in ((pauses.IDLE - 1, 0), (pauses.IDLE, 1)):
        monkeypatch.setattr(gc, "get_count", lambda count=count: (count, 0, 0))
        pauses.rest()
        assert len(collected) == times


class Body:
    """What a request's frame holds: megabytes."""


@pytest.mark.parametrize("way", ["plain", "of a group", "stream"])
def test_a_refused_request_holds_nothing_though_nothing_is_collected(way) -> None:
    """The error holds its frames, and a frame the error: a busy server would keep hundreds of bodies."""
    bodies: list[weakref.ref[Body]] = []

    async def refuse() -> None:
        body = Body()
        bodies.append(weakref.ref(body))
        fault = ApiError(400, "not so")
        if way == "of a group":
            raise fault from BaseExceptionGroup("tasks", [fault])
        raise fault

    async def pieces() -> AsyncGenerator[str, None]:
        await refuse()
        yield "never"

    async def route(request: Request) -> Response:
        if way == "stream":
            return EventStream("first", pieces(), end=None, write_timeout_s=5, cut=lambda scope: None,
                               gone=lambda: None)
        await refuse()
        raise AssertionError

    async def run() -> None:
        app = Direct(lambda scope, receive, send: route(scope), [Route("/busy", route, methods=["POST"])],
                     lambda request, error: Response(error.message, error.status))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            assert "not so" in (await client.post("/busy", content=b"{}")).text
    gc.disable()
    try:
        asyncio.run(run())
        assert bodies[0]() is None
    finally:
        gc.enable()
