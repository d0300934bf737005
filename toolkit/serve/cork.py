"""Writes of one turn of the event loop leave as one.

A send is a call into the kernel, tens of microseconds whatever its size. An answer writes its head and its body, and a
burst of requests writes one message each to the engine, all within one turn: together they are one send, at the turn's
end. Nothing waits longer than the turn it was written in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


class Corked:
    """A transport whose writes are gathered until the event loop's next turn; everything else is the transport's."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport, self._parts = transport, list[bytes]()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._parts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._parts.append(bytes(data))

    def writelines(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def write_eof(self) -> None:
        self._flush()
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
            self._transport.write(b"".join(parts))
