"""One streamed completion over HTTP, timed: a client of ``POST /v1/completions`` on plain asyncio streams.

A load generator must be lighter than what it measures, so this is the least that is needed: one connection a request,
one write, server-sent events read line by line, each stamped when it arrives. Chunked, length-delimited and
close-delimited bodies are understood; sizes are capped.

What goes wrong is a ``failure`` word in the answer, never an average: ``refused`` (no connection), ``status`` (not
200), ``timeout``, ``truncated`` (the stream ended before [DONE] or a finish reason), ``malformed`` (no HTTP, no JSON),
``error`` (an error event in the stream), ``empty`` (200 and no token), ``clock`` (times that go back).
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import SplitResult, urlsplit

from evals.errors import LoadError

LINE_BYTES = 1 << 20
_HEADERS = 100


@dataclass(slots=True)
class Answer:
    """``start`` and ``times`` (arrival of each event with text) in seconds of one clock; token counts from the server's
    own usage, None where it gave none."""

    start: float = 0.0
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finished: bool = False
    failure: str | None = None
    detail: str = ""

    def fail(self, word: str, detail: object) -> None:
        self.failure, self.detail = word, " ".join(str(detail).split())[:200]


class _BadError(Exception):
    """A failure word and its detail, inside one request."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to ask. ``key`` is sent as a bearer token and appears in no record."""

    url: SplitResult
    key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str, key: str | None = None) -> Endpoint:
        """From a base address like ``http://127.0.0.1:8000`` (``/v1`` may follow). LoadError for anything else, or for
        a key that is no header value."""
        parts = _address(url.rstrip("/").removesuffix("/v1"))
        if parts is None or parts.query or parts.fragment:
            raise LoadError(f"{url!r} is not the address of a server", "Give http://HOST:PORT.")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise LoadError("the API key holds characters that a header cannot", "Check the key for line ends.")
        return cls(parts, key)

    def request(self, body: dict[str, Any]) -> bytes:
        content = json.dumps(body).encode()
        lines = [f"POST {self.url.path}/v1/completions HTTP/1.1", f"Host: {self.url.netloc.rpartition('@')[2]}",
                 "Content-Type: application/json", "Accept: text/event-stream", "Connection: close",
                 f"Content-Length: {len(content)}"]
        if self.key:
            lines.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join([*lines, "", ""]).encode() + content


def _address(url: str) -> SplitResult | None:
    """The parts of an address of a server; None without scheme or host, or with a port that is none."""
    try:
        parts = urlsplit(url)
        return parts if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 else None
    except ValueError:
        return None


async def complete(endpoint: Endpoint, body: dict[str, Any], *, timeout_s: float,
                   clock: Callable[[], float] = time.perf_counter) -> Answer:
    """Ask once and read the stream to its end; never raises for what the server or the network does."""
    answer = Answer(start=clock())
    try:
        async with asyncio.timeout(timeout_s):
            await _exchange(endpoint, body, answer, clock)
    except TimeoutError:
        answer.fail("timeout", f"no end after {timeout_s:g} s")
    except _BadError as bad:
        answer.fail(*bad.args)
    except asyncio.IncompleteReadError as error:
        answer.fail("truncated", error)
    except OSError as error:
        answer.fail("truncated" if answer.times else "refused", error)
    answer.end = clock()
    stamps = [answer.start, *answer.times, answer.end]
    if answer.failure is None and any(later < earlier for earlier, later in pairwise(stamps)):
        answer.fail("clock", "times go back")
    return answer


async def _exchange(endpoint: Endpoint, body: dict[str, Any], answer: Answer, clock: Callable[[], float]) -> None:
    secure = ssl.create_default_context() if endpoint.url.scheme == "https" else None
    port = endpoint.url.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(endpoint.url.hostname, port, ssl=secure, limit=LINE_BYTES)
    try:
        writer.write(endpoint.request(body))
        await writer.drain()
        await _read_events(_lines(_body(reader, await _head(reader))), answer, clock)
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> dict[str, str]:
    """Headers by lower-case name; the failure ``status`` unless 200."""
    words = (await _line(reader)).split(None, 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
        raise _BadError("malformed", f"no HTTP status: {' '.join(words)!r}")
    headers: dict[str, str] = {}
    while text := (await _line(reader)).strip():
        name, _, value = text.partition(":")
        headers[name.strip().lower()] = value.strip()
        if len(headers) > _HEADERS:
            raise _BadError("malformed", f"more than {_HEADERS} headers")
    if words[1] != "200":
        raise _BadError("status", " ".join(words[1:]))
    return headers


async def _line(reader: asyncio.StreamReader) -> str:
    try:
        return (await reader.readuntil(b"\n")).decode("utf-8", "replace").rstrip("\r\n")
    except asyncio.LimitOverrunError as error:
        raise _BadError("malformed", f"a line of more than {LINE_BYTES} bytes") from error


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Pieces of the body, however it is delimited. A piece that ends early raises IncompleteReadError."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while True:
            size = (await _line(reader)).split(";")[0].strip()
            try:
                length = int(size, 16)
            except ValueError as error:
                raise _BadError("malformed", f"chunk size {size!r}") from error
            if not 0 <= length <= LINE_BYTES:
                raise _BadError("malformed", f"a chunk of {length} bytes")
            if length == 0:
                return
            yield await reader.readexactly(length)
            await reader.readexactly(2)
    left = int(headers["content-length"]) if headers.get("content-length", "").isdecimal() else None
    while left is None or left > 0:
        piece = await reader.read(LINE_BYTES if left is None else min(left, LINE_BYTES))
        if not piece:
            return
        left = None if left is None else left - len(piece)
        yield piece


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
        if len(rest) > LINE_BYTES:
            raise _BadError("malformed", f"a line of more than {LINE_BYTES} bytes")
    if rest:
        yield rest


async def _read_events(lines: AsyncIterator[bytes], answer: Answer, clock: Callable[[], float]) -> None:
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        now, data = clock(), line[5:].strip()
        if data == b"[DONE]":
            if not answer.times:
                raise _BadError("empty", "the stream ended without a token")
            return
        _take_event(data, now, answer)
    if not answer.finished:
        raise _BadError("truncated", f"the stream ended after {len(answer.times)} events without [DONE]")
    if not answer.times:
        raise _BadError("empty", "the stream ended without a token")


def _take_event(data: bytes, now: float, answer: Answer) -> None:
    try:
        event = json.loads(data)
        if event.get("error"):
            raise _BadError("error", event["error"])
        choices = event.get("choices", [])
        if any(choice.get("text") for choice in choices):
            answer.times.append(now)
        answer.finished |= any(choice.get("finish_reason") for choice in choices)
        if usage := event.get("usage"):
            answer.prompt_tokens, answer.output_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
            details = usage.get("prompt_tokens_details") or {}
            answer.cached_tokens = details.get("cached_tokens")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _BadError("malformed", f"event {data[:80]!r}: {error}") from error
