"""Messages between front end and engine: 4 bytes of length, then JSON, over a socket pair. No pickle.

    to the engine     {"op": "submit", "id", "prompt", "params", "terms", "stream", "score"}
                      {"op": "abort", "id"}   {"op": "stats", "id"}   {"op": "dump"}
    to the front end  {"ev": "hello", ...}                   once, when weights are loaded
                      {"ev": "step", "steps", "tokens": [[id, index, token, text, logprob, finish, error], ...],
                       "done": [...], "scores": [...]}       what a step changed; several when many end
                      {"ev": "refused", "id", "code", "message", "hint"}
                      {"ev": "beat", "steps", "busy"}        twice a second, from a thread of its own
                      {"ev": "stats", "id", ...}

A token's ``logprob`` is [log-probability, [[id, log-probability], ...]] or null.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import Any

from pydantic_core import from_json, to_json

from toolkit.serve.cork import Corked

_HEADER = struct.Struct(">I")
#: Bytes of messages that the front end may have waiting before the engine has to: some hundred steps of a full batch.
_BUFFER = 4 << 20
_READ = 1 << 20
#: Between two beats.
BEAT_S = 0.5
#: The ``code`` of a refusal that is the engine's own fault, not the request's.
FAULT = "engine_fault"
Message = dict[str, Any]


def pack(message: Message) -> bytes:
    data = to_json(message)
    return _HEADER.pack(len(data)) + data


class BlockingWire:
    """The engine's end. Several threads may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()
        self._came = bytearray()

    def send(self, message: Message) -> None:
        data = pack(message)
        with self._lock:
            self._end.sendall(data)

    def receive(self) -> list[Message]:
        """All messages that have come, at least one; none at the end of the connection."""
        while not (messages := self._whole()):
            part = self._end.recv(_READ)
            if not part:
                break
            self._came += part
        return messages

    def _whole(self) -> list[Message]:
        """The messages of which every byte is here."""
        messages: list[Message] = []
        at = 0
        while len(self._came) >= at + _HEADER.size:
            end = at + _HEADER.size + _HEADER.unpack_from(self._came, at)[0]
            if len(self._came) < end:
                break
            messages.append(from_json(self._came[at + _HEADER.size:end]))
            at = end
        del self._came[:at]
        return messages


class AsyncWire:
    """The front end's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._out = Corked(writer.transport)

    @classmethod
    async def over(cls, end: socket.socket) -> AsyncWire:
        return cls(*await asyncio.open_connection(sock=end, limit=_BUFFER))

    def send(self, message: Message) -> None:
        """Queue a message. The engine reads in a thread of its own, so this never waits long."""
        self._out.write(pack(message))

    async def receive(self) -> Message | None:
        """The next message; None at the end of the connection."""
        try:
            header = await self._reader.readexactly(_HEADER.size)
            return from_json(await self._reader.readexactly(_HEADER.unpack(header)[0]))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def close(self) -> None:
        self._out.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
