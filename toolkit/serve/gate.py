"""What is checked before anything is parsed: the Host header, the caller's key, and how large and deep a body is.

**Host.** A page in a browser can make the browser ask a server on this machine under a name of the page's own (DNS
rebinding); such a request carries that name. Only known names are answered. Nothing answers CORS preflights, so pages
of other origins cannot read anything either. Nor can they start anything: what a browser sends without a preflight is
text, a form, or a body without a type and with its page's origin, and none of these is taken.

**Health** is open to everybody: probes have no key and come by address.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from toolkit.serve.answers import error_answer
from toolkit.serve.faults import STOPPING, ApiError, bad, unavailable
from toolkit.serve.options import ANY_HOST, ServeOptions
from toolkit.serve.patience import Patience

#: Paths that need neither key nor a known host.
OPEN = frozenset({"/health", "/v1/health/live", "/v1/health/ready", "/v2/health/live", "/v2/health/ready", "/version"})

#: Objects, lists and fields of one body: a conversation with tools has some thousands, and a million take seconds.
_MOST_PLACES = 1 << 18
_PLACES = (b"[", b"{", b":")
#: A text, also one that does not end: no quote in it is looked at as another's beginning.
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


class Gate:
    """An ASGI application around the application. ``scope["state"]["caller"]`` is the caller's name ("" without keys).
    """

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app, self._options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1003})
            return
        if scope["type"] == "http":
            try:
                caller = self._caller(scope)
            except ApiError as error:
                await error_answer(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> str:
        if scope["path"] in OPEN:
            return ""
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        hosts = self._options.hosts
        if ANY_HOST not in hosts and name not in hosts:
            raise ApiError(403, f"this server does not answer for the host {name[:100]!r}", code="unknown_host")
        if not self._options.keys:
            return ""
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        key = self._options.key_of(secret.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            raise ApiError(401, "no known API key was given: send Authorization: Bearer KEY", code="invalid_api_key",
                           headers={"WWW-Authenticate": "Bearer"})
        return key.name


async def read_body(request: Request, options: ServeOptions, patience: Patience) -> bytes:
    """The whole body. ApiError 415 for what is not sent as JSON, 413 beyond the cap, 408 when it does not come, 503
    when the server stops before."""
    _check_type(request.headers)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise bad("compressed bodies are not taken", "Content-Encoding")
    most = options.max_body_bytes
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 18 or int(length) > most:
        raise _too_large(length, most)
    parts: list[bytes] = []
    size = 0
    try:
        async with patience.wait():
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _too_large(f"at least {size}", most)
                parts.append(part)
    except ClientDisconnect as error:
        raise bad("the client left before its body was here") from error
    except TimeoutError as error:
        if patience.over:  # nothing of the request has begun; it would be refused if it came
            raise unavailable(STOPPING) from error
        raise ApiError(408, f"the body did not come within {patience.limit_s:g} s") from error
    return b"".join(parts)


def _check_type(headers: Headers) -> None:
    """JSON, or bytes that hold it. Programs (Triton's client among them) may leave the type out, pages may not."""
    given = headers.get("content-type")
    if given is None:
        if "origin" in headers:
            raise ApiError(415, "a page's request needs a Content-Type: send application/json", param="Content-Type")
        return
    kind, _, below = given.partition(";")[0].strip().lower().partition("/")
    if not (below == "json" or below.endswith("+json") or (kind, below) == ("application", "octet-stream")):
        raise ApiError(415, f"a body of the type {given[:100]!r} is not taken: send application/json",
                       param="Content-Type")


def _too_large(size: str, most: int) -> ApiError:
    return ApiError(413, f"the body has {size} bytes; this server takes at most {most}")


def load_json(data: bytes, options: ServeOptions) -> Any:
    """Strict JSON: UTF-8, no NaN, no nesting beyond the cap. ApiError 400 says where it breaks."""
    if _places(data) > _MOST_PLACES and (places := _places(_TEXT.sub(b"", data))) > _MOST_PLACES:
        raise bad(f"the body has {places} objects, lists and fields; at most {_MOST_PLACES} are allowed")
    try:
        document = json.loads(data.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise bad(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise _too_deep(options) from error
    except ValueError as error:
        raise bad(f"the body is not JSON: {str(error)[:200]}") from error
    if data.count(b"[") + data.count(b"{") <= options.max_json_depth:
        return document
    level: list[Any] = [document]
    for _ in range(options.max_json_depth):
        level = [inner for outer in level if isinstance(outer, (dict, list))
                 for inner in (outer.values() if isinstance(outer, dict) else outer)
                 if isinstance(inner, (dict, list))]
        if not level:
            return document
    raise _too_deep(options)


def _places(data: bytes) -> int:
    return sum(map(data.count, _PLACES))


def _too_deep(options: ServeOptions) -> ApiError:
    return bad(f"the body is nested deeper than {options.max_json_depth}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
