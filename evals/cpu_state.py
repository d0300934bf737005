"""How long this process waited for a processor while a cell was measured.

A figure taken beside other work is a figure about that work. Linux counts for every thread the nanoseconds that it ran
and the nanoseconds that it was ready to run and did not (``/proc/<pid>/task/<tid>/schedstat``), so

    waited = ready / (ran + ready)

over a cell says by how much the machine was shared: about 0 alone, about a half with as many others as processors.
Elsewhere than on Linux, and where the kernel does not count, there is no figure, and nothing is guessed.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

_TASKS = Path("/proc/self/task")
#: Above this share the machine was not this process's own.
BUSY = 0.15


def _times() -> dict[str, tuple[int, int]]:
    """(ran, ready) in nanoseconds of each thread."""
    found = {}
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        try:
            ran, ready = (task / "schedstat").read_text().split()[:2]
        except (OSError, ValueError):  # the thread has ended, or the kernel does not count
            continue
        found[task.name] = int(ran), int(ready)
    return found


class CpuWatch:
    """Context manager around a cell; ``waited`` afterwards, None where it is not known."""

    def __init__(self) -> None:
        self.waited: float | None = None

    def __enter__(self) -> CpuWatch:
        self._before = _times()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        after = _times()
        ran, ready = (sum(times[part] - self._before.get(task, (0, 0))[part] for task, times in after.items())
                      for part in (0, 1))
        self.waited = ready / (ran + ready) if ran > 0 else None


def busy_note(shares: list[float | None]) -> str | None:
    """What to tell the reader of a sweep whose cells waited for these shares of their time; None for a quiet one."""
    worst = max((share for share in shares if share is not None), default=0.0)
    if worst <= BUSY:
        return None
    return (f"The machine was busy: this process waited for a processor in up to {100 * worst:.0f} % of its time. "
            "Measure again when nothing else runs.")
