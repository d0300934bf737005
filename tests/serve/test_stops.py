"""Clients that leave, engines that hang or die, servers that are told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from toolkit.serve import pauses
from toolkit.serve.client import EngineClient
from toolkit.serve.options import ServeOptions
from toolkit.serve.server import serve as serve_here

LONG = {"model": "tiny", "prompt": "go on", "max_tokens": 900, "temperature": 0, "ignore_eos": True}


def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def idle(server) -> bool:
    return server.metric("toolkit_kv_blocks", '{state="used"}') == 0 and server.metric("toolkit_requests_running") == 0


def events_of(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.iter_lines() if line]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(server, stream: bool) -> None:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    dropped = server.metric("toolkit_dropped_total")
    body = json.dumps(LONG | {"stream": stream, "n": 3}).encode()
    with socket.create_connection((host, int(port))) as end:
        end.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: server.metric("toolkit_requests_running") == 3)
        steps = server.metric("toolkit_steps_total")
    until(lambda: idle(server))
    assert server.metric("toolkit_steps_total") - steps < 850, "it was generated to the end"
    assert server.metric("toolkit_dropped_total") == dropped + 1


@pytest.mark.parametrize("later", [False, True])
def test_a_client_that_leaves_with_a_request_behind_frees_its_blocks(server, later: bool) -> None:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    dropped = server.metric("toolkit_dropped_total")
    body = json.dumps(LONG).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection((host, int(port))) as end:
        end.sendall(request if later else request * 2)
        until(lambda: server.metric("toolkit_requests_running") == 1)
        if later:
            end.sendall(request)
        steps = server.metric("toolkit_steps_total")
    until(lambda: idle(server))
    assert server.metric("toolkit_steps_total") - steps < 850, "it was generated to the end"
    assert server.metric("toolkit_dropped_total") == dropped + 1


def test_closing_an_iterator_is_an_abort(server) -> None:
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}, timeout=30) as response:
        next(response.iter_lines())
    until(lambda: idle(server))


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_fault_of_the_server(server) -> None:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((host, int(port))) as end:
        end.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    until(lambda: server.metric("toolkit_http_requests_total", '{route="/v1/completions",status="400"}') >= 1)
    assert "Traceback" not in "".join(server.log)


def test_a_request_that_takes_too_long_is_504_or_a_last_event(serve) -> None:
    server, body = serve("--request-timeout", "0.1"), LONG | {"n": 8}  # a second of work for a core of its own
    found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert found.status_code == 504, "the engine was done before the front end looked at the clock"
    assert found.json()["error"]["code"] == "deadline"
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=30) as response:
        *_, last, done = events_of(response)
    assert (json.loads(last)["error"]["code"], done) == ("deadline", "[DONE]")
    until(lambda: idle(server))
    assert server.stop() == 0


def test_a_hanging_engine_fails_its_requests_turns_health_and_recovers(serve) -> None:
    server = serve("--watchdog", "1.0")
    engine = server.engine_process
    answers = []
    asking = threading.Thread(target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=LONG,
                                                                       timeout=60)))
    asking.start()
    until(lambda: server.metric("toolkit_requests_running") == 1)
    os.kill(engine, signal.SIGSTOP)
    try:
        asking.join(30)
        assert answers[0].status_code == 503
        assert "no step" in answers[0].json()["error"]["message"]
        for path in ("/health", "/v1/health/ready", "/v2/health/ready"):
            assert httpx.get(server.url + path).status_code == 503
        assert httpx.get(f"{server.url}/v1/health/live").status_code == 200
        assert httpx.post(f"{server.url}/v1/completions", json=LONG).status_code == 503
        assert server.metric("toolkit_engine_up") == 0
    finally:
        os.kill(engine, signal.SIGCONT)

    def healthy() -> bool:
        assert server.process.poll() is None, "".join(server.log)[-5000:]
        return httpx.get(f"{server.url}/health").status_code == 200
    until(healthy)
    assert httpx.post(f"{server.url}/v1/completions", json=LONG | {"max_tokens": 3}, timeout=60).status_code == 200
    until(lambda: idle(server))
    log = "".join(server.log)
    assert "has made no step" in log
    assert "engine state" in log
    assert "Current thread" in log or "Thread 0x" in log, "no stacks were dumped"
    assert server.stop() == 0


@pytest.mark.parametrize("asked", [True, False])
def test_an_engine_that_was_stopped_with_nothing_under_way_serves_again(serve, asked: bool) -> None:
    """It then reads the request and its abort together and makes no step: steps cannot tell that it is well."""
    server = serve("--watchdog", "1.0")
    short = LONG | {"max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/completions", json=short, timeout=60).status_code == 200
    os.kill(server.engine_process, signal.SIGSTOP)
    try:
        if asked:
            found = httpx.post(f"{server.url}/v1/completions", json=short, timeout=60)
            assert (found.status_code, found.json()["error"]["code"]) == (503, "unavailable")
        until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
    finally:
        os.kill(server.engine_process, signal.SIGCONT)
    until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
    assert httpx.post(f"{server.url}/v1/completions", json=short, timeout=60).status_code == 200
    assert server.stop() == 0


def test_a_front_end_that_was_held_up_does_not_take_its_engine_for_dead(tiny_engine) -> None:
    async def run() -> None:
        client = EngineClient(tiny_engine, watchdog_s=0.4)
        try:
            await client.start()
            await asyncio.sleep(0.2)
            time.sleep(2.5)  # (all of the event loop, and longer than any beat may be missing)
            for _ in range(20):
                await asyncio.sleep(0.01)
                assert client.trouble is None
        finally:
            await client.close()
    asyncio.run(run())


def test_a_killed_engine_fails_its_requests_and_ends_the_server(serve) -> None:
    server = serve()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(server.engine_process, signal.SIGKILL)
        rest = [line.removeprefix("data: ") for line in lines if line]
    assert json.loads(rest[-2])["error"]["code"] == "unavailable"
    assert rest[-1] == "[DONE]"
    assert server.process.wait(20) == 4
    assert "ended while serving" in json.loads(server.process.stdout.read())["error"]["message"]


def test_sigterm_lets_requests_finish_closes_the_port_and_exits_0(serve) -> None:
    server = serve("--drain", "60")
    answers = []
    asking = threading.Thread(target=lambda: answers.append(httpx.post(
        f"{server.url}/v1/completions", json=LONG | {"max_tokens": 300}, timeout=60)))
    asking.start()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True, "max_tokens": 300},
                      timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        until(lambda: server.metric("toolkit_requests_running") == 2)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refused(server))
        rest = [line.removeprefix("data: ") for line in lines if line]
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert rest[-1] == "[DONE]"
    asking.join(60)
    assert answers[0].json()["usage"]["completion_tokens"] == 300
    assert server.process.wait(30) == 0
    assert "Traceback" not in "".join(server.log)


def refused(server) -> bool:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_drain_that_is_over_ends_streams_with_a_last_event(serve) -> None:
    server = serve("--drain", "0.2")
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True, "n": 8}, timeout=60
                      ) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line.removeprefix("data: ") for line in lines if line]
    assert json.loads(rest[-2])["error"]["message"] == "the server is shutting down"
    assert rest[-1] == "[DONE]"
    assert server.process.wait(30) == 0


def connection(server, request: bytes, **options: int) -> socket.socket:
    """A client that has sent this; ``options`` are of its socket."""
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    end = socket.socket()
    for name, value in options.items():
        end.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    end.settimeout(20)
    end.connect((host, int(port)))
    end.sendall(request)
    return end


def taken(end: socket.socket) -> bytes:
    """All that comes until the connection ends, in whatever way."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := end.recv(1 << 20):
            data += part
    return data


def test_sigterm_does_not_wait_for_bodies_nor_for_idle_connections(serve) -> None:
    server = serve("--drain", "60")
    half = (b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{" % path
            for path in (b"/v1/completions", b"/v1/chat/completions", b"/tokenize", b"/v2/models/tiny/infer"))
    with contextlib.ExitStack() as stack:
        bodies = [stack.enter_context(connection(server, request)) for request in half]
        idle = [stack.enter_context(connection(server, request)) for request in (b"", b"GET /health HTTP/1.1\r\nHost")]
        kept = stack.enter_context(connection(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        assert b" 200 " in kept.recv(1 << 16)
        server.process.send_signal(signal.SIGTERM)
        for end in bodies:
            head, _, document = taken(end).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert "the server is shutting down" in str(json.loads(document)["error"])
        assert [taken(end) for end in (*idle, kept)] == [b""] * 3
        assert server.process.wait(10) == 0
    assert "Traceback" not in "".join(server.log)


#: Bytes of an answer that is more than sockets hold.
LARGE = 6_500_000


def long_answer() -> bytes:
    """A request for one, written at once."""
    body = json.dumps({"tokens": [257] * (LARGE // len("<|special_1|>"))}).encode()
    return b"POST /detokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def test_an_answer_that_nobody_takes_does_not_outlast_the_drain(serve) -> None:
    server = serve("--drain", "0")
    with connection(server, long_answer(), SO_RCVBUF=4096) as end:
        assert end.recv(12) == b"HTTP/1.1 200"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 0
    assert "Traceback" not in "".join(server.log)


def test_whole_answers_that_nobody_takes_are_cut_and_slow_readers_are_not(tiny_engine, caplog, monkeypatch) -> None:
    monkeypatch.setattr(pauses, "begin", lambda: None)  # (of the server's process, which here is the tests')

    def ask(url: str) -> tuple[list[int], int]:
        server = SimpleNamespace(url=url)
        with contextlib.ExitStack() as stack:
            never = [stack.enter_context(connection(server, long_answer(), SO_RCVBUF=4096)) for _ in range(2)]
            slow = stack.enter_context(connection(server, long_answer(), SO_RCVBUF=65_536))
            read, begun = 0, time.monotonic()
            while read < LARGE:
                part = slow.recv(1 << 16)
                assert part, "it was cut"
                read += len(part)
                time.sleep(0.1 if time.monotonic() - begun < 2.5 else 0.0)
            until(lambda: caplog.text.count("took nothing for 1 s") == 2)
            return [len(taken(end)) for end in never], read

    async def run() -> None:
        ready = asyncio.get_running_loop().create_future()
        options = ServeOptions(model="tiny", port=0, write_timeout_s=1.0)
        serving = asyncio.ensure_future(serve_here(tiny_engine, options, lambda port, _: ready.set_result(port)))
        await asyncio.wait({ready, serving}, return_when=asyncio.FIRST_COMPLETED)
        try:
            never, slow = await asyncio.to_thread(ask, f"http://127.0.0.1:{ready.result()}")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await serving
        assert max(never) < LARGE <= slow
    asyncio.run(run())


def test_a_server_that_was_killed_can_be_started_again_on_its_port(serve) -> None:
    first = serve()
    port = first.url.rsplit(":", 1)[1]
    engine = first.engine_process
    first.process.kill()
    first.process.wait(10)
    until(lambda: not os.path.exists(f"/proc/{engine}") or state_of(engine) == "Z")
    again = serve("--port", port)
    assert again.url == first.url
    assert httpx.post(f"{again.url}/v1/completions", json=LONG | {"max_tokens": 2}, timeout=60).status_code == 200
    assert again.stop() == 0


def state_of(process: int) -> str:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_port_that_is_taken_is_one_sentence(serve, server) -> None:
    second = serve("--port", server.url.rsplit(":", 1)[1])
    assert "cannot be listened on" in second.info["error"]["message"]
    assert second.process.wait(20) == 2
