"""One team of threads a process: rank 0 is the caller, the others sleep between steps.

Compiled code runs without Python's lock, so the threads truly run at once; they are woken by a semaphore each and meet
inside at barriers. Steps of several engines take turns.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from engines.kernels.cpu.native.tiles import aligned

Work = Callable[[int, int, int], None]


class Team:
    """``run`` calls work(rank, size, sync) on ``size`` threads and returns when all have returned from it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turn = threading.Lock()
        self._sync = aligned((24,), "int64")
        self._sync[:] = 0
        self._work: Work | None = None
        self._go = [threading.Semaphore(0) for _ in range(size - 1)]
        self._done = threading.Semaphore(0)
        for rank in range(1, size):
            threading.Thread(target=self._serve, args=(rank,), name=f"engine-team-{rank}", daemon=True).start()

    def _serve(self, rank: int) -> None:
        while True:
            self._go[rank - 1].acquire()
            work = self._work
            assert work is not None
            work(rank, self.size, self._sync.ctypes.data)
            self._done.release()

    def run(self, work: Work) -> None:
        """Run ``work`` on every thread; it must not raise (compiled code does not)."""
        with self._turn:
            self._work = work
            for semaphore in self._go:
                semaphore.release()
            work(0, self.size, self._sync.ctypes.data)
            for _ in self._go:
                self._done.acquire()
            self._work = None


_teams: dict[int, Team] = {}
_making = threading.Lock()


def team(size: int) -> Team:
    """The process's team of that size."""
    with _making:
        if size not in _teams:
            _teams[size] = Team(size)
        return _teams[size]


#: A forked child has none of these threads.
os.register_at_fork(after_in_child=_teams.clear)
