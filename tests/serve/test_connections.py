"""What is asked of a client before a request is anybody's: sizes, times and numbers of heads, and who leaves."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Awaitable, Callable

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from uvicorn.server import ServerState

from toolkit.serve import connections
from toolkit.serve.answers import while_there
from toolkit.serve.connections import MOST_HEAD, MOST_WAITING, Connections
from toolkit.serve.options import ServeOptions

GET = b"GET /now HTTP/1.1\r\nHost: here\r\n"


class Here:
    """A listener with this server's protocol before an application that answers ``/now`` with the body's size, and
    ``/later`` when it is let."""

    def __init__(self, **options) -> None:
        self.shared = Connections(ServeOptions(model="m", **options))
        self.let = asyncio.Event()
        self.begun, self.dropped = 0, 0
        self.state = ServerState()

    async def app(self, scope, receive, send) -> None:
        request = Request(scope, receive)
        self.begun += 1
        if scope["path"] == "/early":
            await Response("early")(scope, receive, send)
            return
        body = await request.body()

        async def work() -> Response:
            if scope["path"] == "/later":
                await self.let.wait()
            return Response(f"{scope['path']} {len(body)}")
        await (await while_there(request, work(), self.drop))(scope, receive, send)

    def drop(self) -> None:
        self.dropped += 1

    async def __aenter__(self) -> Here:
        config = uvicorn.Config(self.app, interface="asgi3", ws="none", log_config=None, proxy_headers=False)
        protocol = self.shared.protocol()
        self.listener = await asyncio.get_running_loop().create_server(
            lambda: protocol(config=config, server_state=self.state, app_state={}), "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.listener.close()
        for connection in list(self.state.connections):
            connection.transport.abort()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.listener.sockets[0].getsockname())

    async def told(self, *parts: bytes) -> bytes:
        """All that is answered until the server closes the connection."""
        reader, writer = await self.connect()
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.005)  # a read of its own
        found = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return found


def run(test: Callable[[Here], Awaitable[None]], **options) -> None:
    async def within() -> None:
        async with Here(**options) as here:
            await asyncio.wait_for(test(here), 30)
    asyncio.run(within())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def answers(reader: asyncio.StreamReader, *words: str) -> None:
    """These are answered next, and the connection stays."""
    for its in words:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"connection: close" not in head
        assert await reader.readexactly(len(its)) == its.encode()


def error_of(answer: bytes, status: int) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:300]
    assert b"connection: close" in head.lower()
    return json.loads(body)["error"]["message"]


def post(path: str, body: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)


@pytest.mark.parametrize("behind", [
    [post("/now")], [post("/now", b"x" * 50_000)], [post("/now", b"x" * 100_000)], [post("/now")] * 100,
    [post("/now", b"xy")[:-1]], [GET], [GET + b"X: " + b"a" * 100_000], [b"NONSENSE\r\n\r\n"], [b"\r\n" * 50_000]])
@pytest.mark.parametrize("together", [True, False], ids=["one write", "later"])
def test_who_leaves_is_noticed_whatever_it_has_sent_behind_its_request(behind, together) -> None:
    async def test(here: Here) -> None:
        _, writer = await here.connect()
        writer.write(post("/later") + (b"".join(behind) if together else b""))
        await until(lambda: here.begun == 1)
        if not together:
            writer.write(b"".join(behind))
        await writer.drain()
        await asyncio.sleep(0.02)
        assert (here.begun, here.dropped) == (1, 0)
        writer.close()
        await until(lambda: here.dropped == 1)
        await until(lambda: not here.state.tasks)
        assert here.begun == 1, "who waited began"
    run(test)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def test(here: Here) -> None:
        reader, writer = await here.connect()
        sizes = [0, 50_000, 1, 500_000, 2]
        writer.write(post("/later") + b"".join(post("/now", b"x" * size) for size in sizes))
        await until(lambda: here.begun == 1)
        here.let.set()
        await answers(reader, "/later 0", *(f"/now {size}" for size in sizes))
        writer.write(post("/now", b"x" * 1_000_000))  # the connection is as it was
        await answers(reader, "/now 1000000")
        writer.close()
    run(test)


def test_a_client_may_always_have_one_behind() -> None:
    async def test(here: Here) -> None:
        reader, writer = await here.connect()
        here.let.set()
        for _ in range(20):
            writer.write(post("/later") + post("/later", b"x" * 50_000))
            await answers(reader, "/later 0", "/later 50000")
        writer.close()
    run(test, max_body_bytes=100_000)


@pytest.mark.parametrize(("behind", "answered"), [
    ([post("/now", b"x")] * 100, MOST_WAITING), ([post("/now", b"x"), post("/now", b"x" * 300_000)], 1),
    ([GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n"], 0), ([post("/now", b"x"), b"NONSENSE\r\n\r\n"], 1),
    ([GET + b"Host: there\r\n\r\n"], 0),
    ([post("/now", b"x" * 90_000)] * 4, 2)])
def test_what_is_too_much_behind_a_request_is_not_answered_and_what_is_before_it_is(behind, answered) -> None:
    async def test(here: Here) -> None:
        reader, writer = await here.connect()
        writer.write(post("/later") + b"".join(behind))
        await until(lambda: here.begun == 1)
        await asyncio.sleep(0.02)
        here.let.set()
        found = await reader.read()
        assert found.count(b"HTTP/1.1 200") == 1 + answered == here.begun
        assert found.count(b"HTTP/1.1") == 1 + answered
        assert found.count(b"connection: close") == 1
        assert b"connection: close" in found.rpartition(b"HTTP/1.1")[2]
        writer.close()
    run(test, max_body_bytes=200_000)


@pytest.mark.parametrize("parts", [
    [GET + b"X: " + b"a" * (MOST_HEAD + 1)], [GET + b"X: "] + [b"a" * 1000] * 70,
    [GET + b"X: " + b"a" * MOST_HEAD + b"\r\n\r\n"], [GET] + [b"X: a\r\n" * 200] * 60,
    [b"GET /" + b"a" * (MOST_HEAD + 1)], [b"\r\n" * 100 + GET + b"X: " + b"a" * (1 << 20)],
    [post("/now", b"x")[:-1].replace(b"Content-Length: 1", b"Transfer-Encoding: chunked") + b"1\r\nx\r\n0\r\nX: ",
     b"a" * (MOST_HEAD + 1)]],
    ids=["a line", "a line in parts", "a whole head", "many lines", "a url", "a MiB", "a trailer"])
def test_a_head_or_trailer_that_is_too_large_is_431_in_words(parts) -> None:
    async def test(here: Here) -> None:
        assert "more than 65536 bytes" in error_of(await here.told(*parts), 431)
        await until(lambda: not here.state.connections and not here.state.tasks)
    run(test)


def test_large_heads_are_taken() -> None:
    async def test(here: Here) -> None:
        found = await here.told(GET + b"X: " + b"a" * (MOST_HEAD - 200) + b"\r\nConnection: close\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 200")
    run(test)


def test_an_endless_head_is_not_read_for_long() -> None:
    async def test(here: Here) -> None:
        _, writer = await here.connect()
        writer.write(GET + b"X: ")

        async def send_for_good() -> None:
            while True:
                writer.write(b"a" * 10_000)
                await writer.drain()
                await asyncio.sleep(0.001)
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(send_for_good(), 10)
        assert not here.state.connections
    run(test)


@pytest.mark.parametrize("begin", [b"POST /now HTTP/1.1\r\nHost: loc", b"\r\nGET /"])
def test_a_head_that_does_not_come_is_408_in_words(begin) -> None:
    async def test(here: Here) -> None:
        reader, writer = await here.connect()
        writer.write(begin)
        dripping = asyncio.create_task(drip(writer, b"a"))
        assert "did not come within 0.2 s" in error_of(await reader.read(), 408)
        dripping.cancel()
        writer.close()
    run(test, body_timeout_s=0.2)


async def drip(writer: asyncio.StreamWriter, drop: bytes) -> None:
    while True:
        writer.write(drop)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(("begin", "drop"), [
    (b"", b""), (b"", b"\r\n"), (b"POST /early HTTP/1.1\r\nHost: here\r\nContent-Length: 100000\r\n\r\n", b"a")],
    ids=["nothing", "empty lines", "a body that is not read"])
def test_a_connection_without_a_request_is_closed(begin, drop) -> None:
    async def test(here: Here) -> None:
        reader, writer = await here.connect()
        writer.write(begin)
        dripping = asyncio.create_task(drip(writer, drop))
        found = await reader.read()
        assert (b"early" in found, found.count(b"HTTP/1.1")) == (bool(begin), bool(begin))
        dripping.cancel()
        writer.close()
    run(test, body_timeout_s=0.2)


def test_a_request_under_way_has_no_time_for_its_next_head() -> None:
    async def test(here: Here) -> None:
        reader, writer = await here.connect()
        for _ in range(2):
            here.let.clear()
            writer.write(post("/later"))
            await asyncio.sleep(0.3)
            assert not here.dropped
            here.let.set()
            assert (await reader.readuntil(b"/later 0")).startswith(b"HTTP/1.1 200")
        writer.close()
    run(test, body_timeout_s=0.1)


def test_connections_beyond_the_most_are_503_and_a_place_that_is_freed_is_given(monkeypatch, caplog) -> None:
    monkeypatch.setattr(connections, "TOLD", 2)

    async def test(here: Here) -> None:
        held = [await here.connect() for _ in range(3)]
        await until(lambda: len(here.state.connections) == 3)
        request = post("/now", b"x" * 10_000)
        for _ in range(5):
            found = await here.told(request)
            assert b"retry-after: 5" in found.lower()
            assert "3 connections are open" in error_of(found, 503)
        told = [await here.connect() for _ in range(2)]
        reader, _ = await here.connect()
        assert await reader.read() == b""  # not even that
        for reader, writer in told:
            assert (await reader.read()).startswith(b"HTTP/1.1 503")
            writer.close()
        held[0][1].close()
        await until(lambda: len(here.state.connections) == 2)
        assert (await here.told(GET + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")
        for reader, writer in held[1:]:
            writer.write(GET + b"Connection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
        assert caplog.text.count("no more are served") == 1
    run(test, max_connections=3, max_queue=0)


def test_the_most_connections_leave_files_for_all_else(monkeypatch) -> None:
    for files, most in ((1024, 1024 - connections.OTHER_FILES - connections.TOLD), (1 << 20, 2048 + 256), (10, 1),
                        (resource.RLIM_INFINITY, 2048 + 256)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert Connections(ServeOptions(model="m")).most == most


@pytest.mark.parametrize("upgrade", [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAA\r\n"])
def test_upgrades_are_ignored(upgrade, caplog) -> None:
    def wishing(request: bytes) -> bytes:
        return request.replace(b"\r\n\r\n", b"\r\n" + upgrade + b"\r\n", 1)

    async def test(here: Here) -> None:
        large = wishing(post("/now", b"x" * 300_000))
        for parts in ([large], [large[:40], large[40:300], large[300:]],
                      [wishing(GET + b"\r\n") + wishing(post("/now", b"y" * 300_000))]):
            reader, writer = await here.connect()
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.005)
            found = await reader.readuntil(b"/now 300000")
            assert found.count(b"HTTP/1.1 200") == found.count(b"HTTP/1.1") == here.begun
            writer.write(post("/now", b"xyz"))  # the connection is as it was
            assert (await reader.readuntil(b"/now 3")).startswith(b"HTTP/1.1 200")
            here.begun = 0
            writer.close()
    run(test)
    assert not caplog.text


def test_there_is_no_proxy_and_noise_is_400_in_words() -> None:
    async def test(here: Here) -> None:
        assert "no proxy" in error_of(await here.told(b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n"), 501)
        for noise in (b"NONSENSE\r\n\r\n", b"\x16\x03\x01\x02\x00", post("/now")[:-4] + b"\r\nBad Name: 1\r\n\r\n",
                      post("/now").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"zz\r\n"):
            assert "no HTTP request" in error_of(await here.told(noise), 400)
        await until(lambda: not here.state.tasks)
    run(test)


def test_a_request_has_one_host() -> None:
    async def test(here: Here) -> None:
        assert "one Host" in error_of(await here.told(GET + b"Host: there\r\n\r\n"), 400)
        body = b"x" * 100_000
        assert "one Host" in error_of(await here.told(post("/now", body).replace(b"\r\n", b"\r\nhOST: here\r\n", 1)),
                                      400)
        assert not here.begun
    run(test)
