"""Writes of one turn of the event loop leave as one.

A send is a call into the kernel, tens of microseconds whatever its size. An answer writes its head and its body, and a
burst of requests writes one message each to the engine, all within one turn: together they are one send, at the turn's
end. Nothing waits longer than the turn it was written in, nor ``longest_s`` of a long one: 256 requests at once are a
turn of a quarter second, and a device that waits for the last of them has lost it.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
import time
from collections.abc import Iterable
from typing import Any


class Corked:
    """A transport whose writes are gathered until the event loop's next turn, or until one comes ``longest_s`` after
    the first; everything else is the transport's."""

    def __init__(self, transport: asyncio.WriteTransport, longest_s: float = 0.001) -> None:
        self._transport, self._parts = transport, list[bytes]()
        self._longest_s, self._begun = longest_s, 0.0
        self._given, self._ended = 0, False

    @property
    def taken(self) -> int:
        """Bytes that have arrived: all that was written, less what waits in the transport and in the socket.

        The transport alone would not do: it is told of room only when a third of the socket's megabytes are gone, and a
        slow reader would seem to take nothing for long."""
        end = self._transport.get_extra_info("socket")
        if end is None or end.fileno() < 0:
            return self._given
        waiting = int.from_bytes(fcntl.ioctl(end.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return self._given - self._transport.get_write_buffer_size() - waiting

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._ended:  # (uvicorn's 100 Continue for a request that was refused)
            return
        now = time.monotonic()
        if not self._parts:
            asyncio.get_running_loop().call_soon(self._flush)
            self._begun = now
        self._parts.append(bytes(data))
        if now - self._begun >= self._longest_s:
            self._flush()

    def writelines(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def write_eof(self) -> None:
        self._flush()
        self._ended = True
        self._transport.write_eof()

    def abort(self) -> None:
        self._parts.clear()
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + sum(map(len, self._parts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            data = b"".join(parts)
            self._given += len(data)
            self._transport.write(data)
