"""What the routes of both protocols share: a body within the caps, a caller, an answer while its client is there."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from toolkit.serve.answers import EventStream, while_there
from toolkit.serve.gate import load_json, read_body
from toolkit.serve.service import Service

#: Ends a connection whose client takes nothing.
Cut = Callable[[Scope], None]


async def body_of(request: Request, service: Service) -> Any:
    """The request's JSON."""
    return load_json(await read_body(request, service.options, service.patience), service.options)


def caller_of(request: Request) -> str:
    """Who the gate let in."""
    return request.scope["state"]["caller"]


def route_of(request: Request) -> str:
    """The route's template, for the figures."""
    return getattr(request.scope.get("route"), "path", "none")


async def answered(request: Request, service: Service, work: Coroutine[Any, Any, Response]) -> Response:
    """The answer of ``work``, which ends when its client leaves; counted."""
    response = await while_there(request, work, service.metrics.dropped.inc)
    service.metrics.answers.labels(route_of(request), response.status_code).inc()
    return response


async def streamed(service: Service, pieces: AsyncGenerator[str, None], end: str | None, cut: Cut) -> Response:
    """A stream that has begun: what the engine refuses is still an answer with its own status."""
    first = await anext(pieces)
    return EventStream(first, pieces, end=end, write_timeout_s=service.options.write_timeout_s, cut=cut,
                       gone=service.metrics.dropped.inc)
