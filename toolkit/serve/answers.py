"""Answers that end when their client does.

A plain answer is computed beside a watch for the client's leaving; a stream is written beside one. Leaving cancels the
work, and a cancelled ticket is an abort in the engine before its next step. A client that is there but does not read is
given ``write_timeout_s`` for each piece (looked at once a second), then its connection is cut.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from toolkit.serve.faults import ApiError, settled
from toolkit.serve.service import first_fault

_LOG = logging.getLogger(__name__)
_GONE = 499


class Json(Response):
    """A JSON document; NaN and infinity are errors."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def error_answer(error: ApiError) -> Json:
    return Json(error.body, error.status, headers=error.headers)


async def _left(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stopped(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def while_there(request: Request, work: Coroutine[Any, Any, Response], gone: Callable[[], None]) -> Response:
    """The answer, unless the client leaves before: then the work is cancelled, ``gone`` is called, and nobody reads
    what is returned.

    The work is done in the request's own task: of a burst, the first request reaches the engine before the last one is
    looked at. A task of its own would begin after all of them.
    """
    its, left = asyncio.current_task(), asyncio.ensure_future(_left(request.receive))
    assert its is not None
    working, stopped = True, False

    def stop(_: asyncio.Future[None]) -> None:
        nonlocal stopped
        if working:
            stopped = its.cancel()

    left.add_done_callback(stop)
    try:
        return await work
    except asyncio.CancelledError:
        if not stopped:
            raise
        return Response(status_code=_GONE)
    except BaseExceptionGroup as group:
        raise first_fault(group) from group
    finally:
        working = False
        left.cancel()
        if stopped:
            its.uncancel()
            gone()


class EventStream(Response):
    """Server-sent events: the first one's data and a generator of the others'. An ApiError becomes a last event; then
    ``end``, if given. The generator is closed whatever happens."""

    def __init__(self, first: str, events: AsyncGenerator[str, None], *, end: str | None, write_timeout_s: float,
                 cut: Callable[[Scope], None], gone: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache",
                                                                  "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._events, self._end = first, events, end
        self._timeout, self._cut, self._gone = write_timeout_s, cut, gone
        #: Since when a piece waits to be taken, by the event loop's clock.
        self._since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing, left = asyncio.ensure_future(self._write(send)), asyncio.ensure_future(_left(receive))
        loop, every = asyncio.get_running_loop(), min(1.0, self._timeout / 4)
        try:
            while not (writing.done() or left.done()):
                await asyncio.wait({writing, left}, timeout=every, return_when=asyncio.FIRST_COMPLETED)
                if self._since is not None and loop.time() - self._since > self._timeout and not writing.done():
                    _LOG.warning("a client took nothing for %g s; its connection is cut", self._timeout)
                    self._gone()
                    self._cut(scope)
                    return
            if writing.done():
                writing.result()
            else:
                self._gone()
        finally:
            await _stopped(writing, left)
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time

        async def put(message: dict[str, Any]) -> None:
            self._since = clock()
            await send(message)
            self._since = None

        await put({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces():
            await put({"type": "http.response.body", "body": f"data: {piece}\n\n".encode(), "more_body": True})
        await put({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces(self) -> AsyncIterator[str]:
        try:
            yield self._first
            async for event in self._events:
                yield event
        except ApiError as error:
            yield json.dumps(settled(error).body)
        except Exception:
            _LOG.exception("a stream failed")
            yield json.dumps(ApiError(500, "the server failed; its log says how", code="internal").body)
        if self._end is not None:
            yield self._end
