"""The front end's event loop: of many sockets that are ready at once, a few are looked at in each turn.

A loop handles in one turn all that is ready when it begins, and what comes of that in the next. So of a burst of
requests all would be read before the first is parsed, and the engine would wait for the last of them: of 64, up to
20 ms. A few at a time, the first ones are in the engine while the others are read.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque

#: Few enough for the first of them to be sent after some milliseconds, enough to share a turn's own cost.
AT_ONCE = 8


class FewAtOnce(selectors.DefaultSelector):
    """A selector that gives out what it has found ``AT_ONCE`` at a time, in order, before it looks again."""

    def __init__(self) -> None:
        super().__init__()
        self._found: deque[tuple[selectors.SelectorKey, int]] = deque()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._found:
            self._found += super().select(timeout)
        registered = self.get_map()
        few: list[tuple[selectors.SelectorKey, int]] = []
        while self._found and len(few) < AT_ONCE:
            key, events = self._found.popleft()
            if registered.get(key.fd) is key:  # closed or changed since: what is still ready is found again
                few.append((key, events))
        return few


def new_loop() -> asyncio.AbstractEventLoop:
    """For ``asyncio.Runner``."""
    return asyncio.SelectorEventLoop(FewAtOnce())
