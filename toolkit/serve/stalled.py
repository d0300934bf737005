"""Connections whose clients take nothing of what was written to them.

A stream notices while it writes (``answers``). A whole answer is written at once: its request is done, and what the
client does not take stays in the connection, with or without a limit on idle ones. So all connections are looked at,
and one that has bytes to send and got rid of none in ``longest_s`` seconds is cut.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from toolkit.serve.cork import Corked

_LOG = logging.getLogger(__name__)


class Stalled:
    """Looks at the connections that ``all_open`` gives."""

    def __init__(self, all_open: Callable[[], Iterable[Corked]], longest_s: float) -> None:
        self._all_open, self._longest_s = all_open, longest_s
        #: Of those with bytes to send: how many the client had taken, and since when.
        self._seen: dict[Corked, tuple[int, float]] = {}

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(min(1.0, self._longest_s / 4))
            self._look(asyncio.get_running_loop().time())

    def _look(self, now: float) -> None:
        before, self._seen = self._seen, {}
        for connection in self._all_open():
            if not connection.get_write_buffer_size():
                continue
            taken = connection.taken
            had, since = before.get(connection, (-1, now))
            if taken != had:
                since = now
            elif now - since > self._longest_s:
                _LOG.warning("a client took nothing for %g s; its connection is cut", self._longest_s)
                connection.abort()
                continue
            self._seen[connection] = (taken, since)
