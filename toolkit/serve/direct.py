"""The busy routes, reached without the framework's layers.

FastAPI's routing, dependencies, telemetry and exception handling take a third of a short request's time in the front
end, and at some hundred requests at once that is time in which the device waits. A POST to one of these paths goes to
its handler at once; every other request, and every other method on them, is the application's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from toolkit.serve.faults import ApiError, settled

_LOG = logging.getLogger(__name__)


class Direct:
    """An ASGI application around the application. ``failed`` makes an answer of an ApiError."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route], failed: Callable[[Request, ApiError], Response]) -> None:
        self._app, self._failed = app, failed
        self._routes = {route.path: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive, send)
        try:
            response = await route.endpoint(request)
        except ApiError as error:
            response = self._failed(request, settled(error))
        except Exception:
            _LOG.exception("%s failed", route.path)
            response = self._failed(request, ApiError(500, "the server failed; its log says how", code="internal"))
        await response(scope, receive, send)
