"""Anonymous memory of this process: what an engine really takes, mapped files excluded."""

from __future__ import annotations

from calib.peak import anonymous_bytes


class MemoryWatch:
    """Peak of the anonymous bytes seen by ``look`` since construction, above what the process had then.

    In a fresh process that has only imported this package, that is the engine's own memory.
    """

    __slots__ = ("_base", "peak")

    def __init__(self) -> None:
        self._base = anonymous_bytes()
        self.peak: int | None = None if self._base is None else 0

    def look(self) -> None:
        now = anonymous_bytes()
        if now is not None and self._base is not None and self.peak is not None:
            self.peak = max(self.peak, now - self._base)
