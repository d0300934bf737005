"""How the toolkit speaks in a terminal: progress with an ETA, tables with aligned numbers.

Progress goes to stderr. On a terminal it is a rich bar; elsewhere (a log, CI) a line when a stage begins and then one
every 30 s. The ETA is the rate since the stage began here (it may have been resumed), carried forward; where a stage
does not say how much there is, no ETA is invented.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from calib.progress import Progress
from toolkit.streams import mute

EVERY_S = 30.0
VERDICT_STYLE = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow", "ANOMALOUS": "bold magenta",
                 "BASELINE": "dim"}


class _Patient(Console):
    """A console whose reader may go away (``| head -1``): what follows is not shown, and the command goes on.

    Rich's own way is to end the process with code 1, which is also the gate's FAIL.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        mute(sys.stderr if self.stderr else sys.stdout)


def stdout() -> Console:
    """Wide enough for the row table when the output is a file or a pipe."""
    return _Patient(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 200)


def stderr() -> Console:
    return _Patient(stderr=True, highlight=False)


def verdict_text(word: str | None) -> Text:
    return Text(word or "not judged", style=VERDICT_STYLE.get(word or "", "dim"))


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class _Left(ProgressColumn):
    """Counts down to ``ends``. (rich's own column forgets steps older than 30 s, so a slow stage has no estimate.)"""

    def render(self, task: Task) -> Text:
        ends = task.fields["ends"]
        return Text("" if ends is None else f"about {duration(ends - time.monotonic())} left", style="cyan")


class Watcher:
    """Context manager and ``calib.progress.Report`` in one. Never raises into the work that reports to it."""

    def __init__(self, quiet: bool = False) -> None:
        self._console = stderr()
        self._quiet = quiet
        self._bars = self._make_bars() if self._console.is_terminal and not quiet else None
        self._task: TaskID | None = None
        self._last: Progress | None = None
        self._stage = ""
        self._began = self._spoke = self._first = 0.0

    def _make_bars(self) -> Bars:
        return Bars(SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=28),
                    TextColumn("{task.fields[count]}", justify="right", markup=False), TimeElapsedColumn(),
                    _Left(),
                    TextColumn("{task.fields[message]}", style="dim", markup=False),
                    console=self._console, transient=True)

    def __enter__(self) -> Watcher:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._bars:
            self._close_stage()
            self._bars.stop()

    def note(self, message: str) -> None:
        """One line for people, above the bars."""
        if not self._quiet:
            self._console.print(message, markup=False)

    def __call__(self, event: Progress) -> None:
        if self._quiet:
            return
        if event.stage != self._stage:
            if self._last is not None and self._last.total == 1:  # one thing to do, and the work went on: it is done
                self._last = replace(self._last, done=1, at=event.at)
            self._close_stage()
            self._stage, self._began, self._spoke, self._first = event.stage, event.at, 0.0, event.done
        if self._bars:
            self._draw(self._bars, event)
        elif not self._spoke or time.monotonic() - self._spoke >= EVERY_S:
            self._spoke = time.monotonic()
            self._console.print(self._line(event), markup=False)

    def _draw(self, bars: Bars, event: Progress) -> None:
        if self._task is None:
            self._task = bars.add_task(event.stage, total=event.total, count="", message="", ends=None)
        left = self._left(event)
        bars.update(self._task, total=event.total, completed=event.done, count=_count(event), message=event.message,
                    ends=None if left is None else event.at + left)
        self._last = event

    def _close_stage(self) -> None:
        """A finished stage becomes a line above the bar, so that a long job stays one bar high."""
        if self._bars and self._task is not None and self._last is not None:
            whole = self._last.total is None or self._last.done >= self._last.total
            mark = "[green]✓[/]" if whole else "[yellow]·[/]"
            spent = duration(self._last.at - self._began)
            self._bars.remove_task(self._task)
            self._bars.refresh()  # or the print below would leave the last frame behind it
            self._bars.console.print(f"{mark} {escape(self._last.stage)}  [dim]{_count(self._last)}, {spent}[/]")
        self._task = self._last = None

    def _left(self, event: Progress) -> float | None:
        """Seconds that the stage has left at its rate so far; None while nothing can be said, and at its end."""
        spent = event.at - self._began
        passed = event.done - self._first  # a resumed stage does not begin at zero
        if not event.total or passed <= 0 or spent <= 0 or event.done >= event.total:
            return None
        return spent * (event.total - event.done) / passed

    def _line(self, event: Progress) -> str:
        left = self._left(event)
        eta = "" if left is None else f", about {duration(left)} left"
        return f"{event.stage}: {'  '.join(part for part in (_count(event) + eta, event.message) if part)}"


def _count(event: Progress) -> str:
    """How far: ``3/8 texts``, ``1 rate``; nothing where nothing is counted (a note)."""
    if not event.total and not event.done:
        return ""
    unit = event.unit if (event.total or event.done) == 1 or event.unit.isupper() else f"{event.unit}s"
    done = f"{event.done:g}"
    return f"{done}/{event.total:g} {unit}" if event.total else f"{done} {unit}"
