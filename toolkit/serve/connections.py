"""Connections: what is asked of a client before a request is anybody's. Over uvicorn's own protocol:

**Who leaves is noticed**, also behind pipelined requests. Those are parsed and wait; reading never stops for them,
so a connection's end is seen while a request is under way. What is more than may wait is not taken: the connection
closes after the answers before it. (A client that ends its own side only, and waits, cannot be told from one that has
left: it is taken for that.)

**Heads are bounded** in size (431) and time (408), trailers and a new connection that says nothing too, and so is the
number of connections (503). None of this asks for a key: it comes before.

**Upgrades are ignored**, as HTTP allows: Java's client asks for HTTP/2 with every first request. httptools stops at
one, so its head is given to it again without the wish.

Refusals have the API's words and end the connection. They are read to the end for a moment: a socket that is closed
with unread bytes takes the answer back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from toolkit.serve.answers import error_answer
from toolkit.serve.cork import Corked
from toolkit.serve.faults import ApiError, bad, settled
from toolkit.serve.options import ServeOptions

_LOG = logging.getLogger(__name__)
#: Bytes of a head: its URL and its headers. Tokens and cookies are a few KiB.
MOST_HEAD = 64 * 1024
#: Pipelined requests behind the one under way; together their bodies are as large as one may be.
MOST_WAITING = 16
#: For a refused client to read why.
LINGER_S = 2.0
#: Connections beyond the most that are still told so.
TOLD = 64
#: Open files that are no connections: the listener, the engine, the log, and those of Python and its libraries.
OTHER_FILES = 64


class Connections:
    """All connections of one server: how many there may be, and each by its peer's address, so that it can be cut."""

    def __init__(self, options: ServeOptions) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = options.max_connections + options.max_queue
        #: More are refused.
        self.most = wanted if files == resource.RLIM_INFINITY else max(1, min(wanted, files - OTHER_FILES - TOLD))
        #: Seconds for a head, and for a connection's first.
        self.patience_s = options.body_timeout_s
        self.most_body = options.max_body_bytes
        self._transports: dict[tuple[str, int], asyncio.Transport] = {}
        self._full = False

    def protocol(self) -> type[HttpToolsProtocol]:
        """The protocol for uvicorn's configuration."""
        class Protocol(Connection):
            shared = self
        return Protocol

    def opened(self, client: tuple[str, int] | None, transport: asyncio.Transport, count: int) -> None:
        """One more, of ``count``."""
        if client is not None:
            self._transports[client] = transport
        if count > self.most and not self._full:
            _LOG.warning("%d connections are open, and no more are served", self.most)
            self._full = True
        elif count < 0.9 * self.most:  # said once, not each time that one goes and one comes
            self._full = False

    def closed(self, client: tuple[str, int] | None) -> None:
        if client is not None:
            self._transports.pop(client, None)

    def cut(self, scope: Scope) -> None:
        """End a request's connection at once."""
        client = scope.get("client")
        if client is not None and (transport := self._transports.get(tuple(client))) is not None:
            transport.abort()


class Connection(HttpToolsProtocol):
    """One connection."""

    shared: Connections

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: The oldest request that is not answered, or the last one that was. (``cycle`` is the newest.)
        self._running: RequestResponseCycle | None = None
        #: Nothing more is taken: what comes is dropped.
        self._deaf = False
        #: A head has begun and is not whole.
        self._in_head = False
        #: Whether what was read last ended a head or was of a body; and the bytes since then, which the parser holds.
        self._fruitful, self._barren = False, 0
        #: Bytes of the bodies that wait.
        self._behind = 0
        #: Runs while no request is under way and a head should come.
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, Corked(transport)))
        count = len(self.connections)
        self.shared.opened(self.client, transport, count)
        if count > self.shared.most + TOLD:
            transport.abort()
        elif count > self.shared.most:
            self._say(ApiError(503, f"{self.shared.most} connections are open, and no more are served",
                               code="overloaded", headers={"Retry-After": "5"}))
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.shared.closed(self.client)
        self._time(None)
        self.pipeline.clear()
        if (running := self._under_way) is not None:  # (uvicorn tells the newest request only)
            _disconnect(running)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._deaf:
            return
        self._fruitful = False
        self._barren += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            fault = error.__context__
            self._refuse(settled(fault) if isinstance(fault, ApiError) else bad("this is no HTTP request"))
            return
        if self._fruitful:
            self._barren = 0  # (what it may hold of a next head is at most one read)
        if self._barren > MOST_HEAD:
            self._refuse(_head_too_large())
        elif self._timer is None and self._under_way is None:
            self._expect_head()

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                head = self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
                data = head + data[upgrade.args[0]:]

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    # The parser's calls. An ApiError is raised out of it: it stops there.

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ApiError(501, "this is no proxy", code="not_supported")
            return  # it comes again, without
        if self._barren > MOST_HEAD and self._head_size() > MOST_HEAD:
            raise _head_too_large()
        if [name for name, _ in self.headers].count(b"host") > 1:
            raise bad("a request has one Host header", "Host")
        if len(self.pipeline) == MOST_WAITING:
            raise _too_much_behind()
        waiting = self._under_way is not None
        super().on_headers_complete()
        self._in_head, self._fruitful = False, True
        if self._timer is not None:
            self._time(None)
        if waiting:
            self.flow.resume_reading()  # uvicorn has paused it, and would not see the client leave
        else:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        self._fruitful = True
        if self.cycle is self._running:
            super().on_body(body)
            return
        self._behind += len(body)
        if self._behind > self.shared.most_body:
            raise _too_much_behind()
        super().on_body(body)
        self.flow.resume_reading()  # as above

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
            self._behind -= len(self._running.body)
        super().on_response_complete()

    @property
    def _under_way(self) -> RequestResponseCycle | None:
        """The request that is being answered."""
        return None if self._running is None or self._running.response_complete else self._running

    def _time(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def _expect_head(self) -> None:
        self._time(self.loop.call_later(self.shared.patience_s, self._late))

    def _late(self) -> None:
        self._refuse(ApiError(408, f"the request's head did not come within {self.shared.patience_s:g} s"))

    def _refuse(self, fault: ApiError) -> None:
        """Take nothing more. The fault is said if that is in order: of a request, not into another's answer."""
        self._deaf = True
        running = self._under_way
        if running is None and self._in_head:
            self._say(fault)
        elif running is None:  # nothing was asked, or that is answered
            self.transport.close()
        elif running is self.cycle and running.more_body and not running.response_started:  # its own body
            _disconnect(running)
            self._say(fault)
        else:
            if self.pipeline and self.cycle.more_body:  # it is not whole, and never will be
                self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else running
            self.cycle.keep_alive = False

    def _say(self, fault: ApiError) -> None:
        """Answer a request that has come to no route, and close."""
        self._deaf = True
        answer = error_answer(fault)
        headers = [*self.server_state.default_headers, *answer.raw_headers, (b"connection", b"close")]
        self.transport.write(b"".join([STATUS_LINE[fault.status], *(b"%b: %b\r\n" % pair for pair in headers), b"\r\n",
                                       bytes(answer.body)]))
        with contextlib.suppress(OSError):  # the client has closed already
            self.transport.write_eof()
        self._time(self.loop.call_later(LINGER_S, self.transport.close))


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tell a request that its client has gone."""
    cycle.disconnected = True
    cycle.message_event.set()


def _head_too_large() -> ApiError:
    return ApiError(431, f"the request's head has more than {MOST_HEAD} bytes")


def _too_much_behind() -> ApiError:
    """(Never said: the answers before it are under way.)"""
    return ApiError(429, "too much is sent behind a request that is not answered")
