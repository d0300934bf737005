"""A terminal's own work in the job table: ``toolkit jobs ls`` and the dashboard show it while it goes on.

A home that cannot be written (a read-only disk, a folder of somebody else) costs the record, never the work.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from collections.abc import Sequence
from types import TracebackType

from calib.errors import ToolkitError
from calib.progress import Progress
from toolkit.console import Watcher
from toolkit.home import Home
from toolkit.jobs import JobTable, Recorder


class RecordedWatcher(Watcher):
    """Shows progress, and writes it into the table. ``ends``: the row's end is this watcher's to write."""

    def __init__(self, home: Home, quiet: bool, job: str, ends: bool) -> None:
        super().__init__(quiet)
        self._home, self._job, self._ends = home, job, ends
        self._record = Recorder(home.store, job)

    def __call__(self, event: Progress) -> None:
        super().__call__(event)
        self._record(event)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        if self._ends:
            code = 0 if error is None else 130 if isinstance(error, KeyboardInterrupt) else getattr(
                error, "exit_code", 4)
            with contextlib.suppress(sqlite3.Error, OSError, ToolkitError), JobTable(self._home.store) as table:
                table.finish(self._job, code)


def _said(arguments: Sequence[str]) -> list[str]:
    """The command line without what only says where and how it speaks."""
    kept = []
    rest = iter(arguments)
    for word in rest:
        if word == "--home":
            next(rest, None)
        elif word not in ("--json", "-q", "--quiet") and not word.startswith("--home="):
            kept.append(word)
    return kept


def watcher(home: Home, quiet: bool, job: str | None) -> Watcher:
    """A watcher that records: under ``job`` (whose worker writes its end), else as work of this terminal."""
    if job is not None:
        return RecordedWatcher(home, quiet, job, ends=False)
    words = _said(sys.argv[1:])
    try:
        with JobTable(home.store) as table:
            own = table.add(words[0] if words else "work", words[1:], own=False)
            table.adopt(own, "running")
    except (sqlite3.Error, OSError, ToolkitError):
        return Watcher(quiet)
    return RecordedWatcher(home, quiet, own, ends=True)
