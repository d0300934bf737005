"""Peak anonymous memory of this process while something runs.

Anonymous memory (RssAnon: heap and stacks) is what a machine must really have; pages of mapped weight files come and go
as the kernel sees fit. The kernel keeps a high-water mark of both together only, so a thread looks every few
milliseconds.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

_STATUS = Path("/proc/self/status")
_EVERY_S = 0.01


def anonymous_bytes() -> int | None:
    """Anonymous resident memory now; None where the system does not tell."""
    if not _STATUS.is_file():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None


class AnonymousPeak:
    """Context manager; ``bytes`` is the largest value seen since it was entered (None where nothing can be seen)."""

    def __init__(self) -> None:
        self.bytes = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _look(self) -> None:
        now = anonymous_bytes()
        if now is not None:
            self.bytes = max(now, self.bytes or 0)

    def _watch(self) -> None:
        while not self._done.wait(_EVERY_S):
            self._look()

    def __enter__(self) -> AnonymousPeak:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._look()
        self._done.set()
        self._thread.join()
