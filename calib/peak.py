"""Peak anonymous memory of this process while something runs; and giving back what is free.

Anonymous memory (RssAnon: heap and stacks) is what a machine must really have; pages of mapped weight files come and go
as the kernel sees fit. The kernel keeps a high-water mark of both together only, so a thread looks every few
milliseconds.

A heap that lends out codes between the float32 temporaries they came from keeps the holes: on a model of 36 million
parameters the export alone seemed to take 141 MB for 36 MB of codes. glibc gives such holes back when asked to.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import torch

_STATUS = Path("/proc/self/status")
_EVERY_S = 0.01
_TRIM_BYTES = 16 * 1024**2


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


def release_memory() -> None:
    """Collect what refers to itself (quantized modules do), and give free pages back to the system where glibc can."""
    gc.collect()
    give_back()


def give_back() -> None:
    """Give the heap's free pages back to the system, where glibc can: what one layer's temporaries leave is not held
    while the next one's, of other sizes, are made. Milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def released(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream unchanged; every 16 MB of it, what its making left free goes back."""
    passed = 0
    for name, tensor in tensors:
        yield name, tensor
        passed += tensor.nbytes
        if passed > _TRIM_BYTES:
            give_back()
            passed = 0
