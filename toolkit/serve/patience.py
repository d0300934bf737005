"""How long bodies are waited for: a limit each, and not at all once the server stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Patience:
    """Waits of ``limit_s`` seconds that end together when it is over."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.over = False
        self._waits: set[asyncio.Timeout] = set()

    @contextlib.asynccontextmanager
    async def wait(self) -> AsyncIterator[None]:
        """TimeoutError when the limit has passed or ``end`` was called; what is there without waiting is still read."""
        async with asyncio.timeout(0.0 if self.over else self.limit_s) as its:
            self._waits.add(its)
            try:
                yield
            finally:
                self._waits.discard(its)

    def end(self) -> None:
        """Nothing is waited for any more."""
        self.over = True
        for its in self._waits:
            if not its.expired():
                its.reschedule(0.0)
