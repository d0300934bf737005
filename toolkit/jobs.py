"""The job table: long work that goes on now or has ended, wherever it was started, and how to stop it.

Two ways in, one table. A verb that is run in a terminal records itself while it watches its progress. ``start`` (the
dashboard) writes a row and starts ``python -m toolkit.worker`` as a process of its own, in its own session: neither a
reloaded page, a second tab nor the end of the page's server touches it. Started work is done one job at a time, so that
a latency sweep never measures beside a calibration; what waits says so.

A row outlives its process. A process is known by its id *and* the time it began, since ids are used again; a row that
says "running" while its process is gone was killed, and is shown so.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import psutil

from calib.errors import UnknownNameError
from calib.progress import Progress
from toolkit.audit import now
from toolkit.database import Database
from toolkit.errors import UsageError
from toolkit.home import Home

State = Literal["waiting", "running", "finished", "failed", "cancelled", "killed"]
ENDED = ("finished", "failed", "cancelled", "killed")
#: What may be started from a page: long work on this home, nothing that moves releases or reads elsewhere.
STARTABLE = ("quantize", "build", "eval", "sweep", "run", "sensitivity", "generate", "data")
EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Work:
    """One job. ``own``: it has a process group of its own, which a cancel reaches as a whole."""

    id: str
    verb: str
    arguments: list[str]
    state: State
    asked: str
    began: str | None
    ended: str | None
    exit_code: int | None
    pid: int | None
    own: bool
    stage: str
    done: float
    total: float | None
    unit: str
    stage_began: str | None
    updated: str | None
    cancel: str | None

    @property
    def over(self) -> bool:
        return self.state in ENDED

    @property
    def share(self) -> float | None:
        """How much of the present stage is done, 0..1; None where the stage does not say."""
        return min(1.0, self.done / self.total) if self.total else None

    @property
    def eta_s(self) -> float | None:
        """Seconds that the present stage has left at the rate since it began; None where nothing can be said."""
        if self.over or not self.total or not self.done or not self.stage_began or not self.updated:
            return None
        spent = (datetime.fromisoformat(self.updated) - datetime.fromisoformat(self.stage_began)).total_seconds()
        return spent * (self.total - self.done) / self.done if spent > 0 else None


def folder_of(home: Home) -> Path:
    return home.path / "jobs"


def log_of(home: Home, job: str) -> Path:
    """What the job said on stderr: progress and errors."""
    return folder_of(home) / f"{job}.log"


def output_of(home: Home, job: str) -> Path:
    """What the job wrote on stdout: its result, one JSON document."""
    return folder_of(home) / f"{job}.json"


class JobTable(Database):
    """The table of work in a home's store."""

    def add(self, verb: str, arguments: Sequence[str], own: bool) -> str:
        """A new row, waiting; returns its id."""
        name = f"{datetime.now():%m%d-%H%M%S}-{secrets.token_hex(3)}"
        with self._write() as db:
            db.execute("INSERT INTO work(id, verb, arguments, state, asked, own, stage, done, unit) "
                       "VALUES(?,?,?,'waiting',?,?,'',0,'')", (name, verb, json.dumps(list(arguments)), now(), own))
        return name

    def adopt(self, job: str, state: State) -> None:
        """This process does the job from now on."""
        me = psutil.Process()
        with self._write() as db:
            db.execute("UPDATE work SET state=?, pid=?, pid_began=?, began=? WHERE id=?",
                       (state, me.pid, me.create_time(), now(), job))

    def started(self, job: str, pid: int) -> None:
        """The process that was started for the job; it has not spoken yet."""
        with contextlib.suppress(psutil.NoSuchProcess), self._write() as db:
            db.execute("UPDATE work SET pid=?, pid_began=? WHERE id=? AND pid IS NULL",
                       (pid, psutil.Process(pid).create_time(), job))

    def progress(self, job: str, event: Progress) -> None:
        at = now()
        with self._write() as db:
            db.execute("UPDATE work SET stage_began=CASE WHEN stage=? THEN stage_began ELSE ? END, stage=?, done=?, "
                       "total=?, unit=?, updated=? WHERE id=?",
                       (event.stage, at, event.stage, event.done, event.total, event.unit, at, job))

    def finish(self, job: str, exit_code: int) -> None:
        state = {0: "finished", 130: "cancelled"}.get(exit_code, "failed")
        with self._write() as db:
            db.execute("UPDATE work SET state=?, exit_code=?, ended=? WHERE id=? AND ended IS NULL",
                       (state, exit_code, now(), job))

    def list(self, limit: int = 50, offset: int = 0) -> list[Work]:
        """One page, newest first."""
        found = self._db.execute("SELECT * FROM work ORDER BY asked DESC, rowid DESC LIMIT ? OFFSET ?",
                                 (limit, offset)).fetchall()
        return [_work(row) for row in found]

    def count(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM work").fetchone()[0])

    def find(self, name: str) -> Work:
        """By id or its unambiguous prefix."""
        found = self._db.execute("SELECT * FROM work WHERE substr(id, 1, ?)=? LIMIT 2", (len(name), name)).fetchall()
        if not found or not name:
            held = [work.id for work in self.list(20)]
            raise UnknownNameError("job", name, held, "" if held else "This home has none yet: jobs are what quantize, "
                                   "build, eval, sweep and run start.")
        if len(found) > 1:
            raise UsageError(f"job {name!r} is ambiguous", "Give more characters.")
        return _work(found[0])

    def cancel(self, job: str, force: bool = False) -> Work:
        """Ask the job to stop (as Ctrl-C does), or with ``force`` end it; what it made stays."""
        work = self.find(job)
        if work.over:
            raise UsageError(f"job {work.id} is over: {work.state}", "There is nothing to cancel.")
        with self._write() as db:
            db.execute("UPDATE work SET cancel=? WHERE id=?", (now(), work.id))
        if work.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                stop = signal.SIGKILL if force else signal.SIGINT
                (os.killpg if work.own else os.kill)(work.pid, stop)
        return self.find(work.id)


def _work(row: sqlite3.Row) -> Work:
    content = {name: row[name] for name in row.keys() if name != "pid_began"}  # noqa: SIM118
    content |= {"arguments": json.loads(row["arguments"]), "own": bool(row["own"])}
    if content["state"] in ("waiting", "running") and not _there(row["pid"], row["pid_began"], row["asked"]):
        content["state"] = "cancelled" if row["cancel"] else "killed"
    return Work(**content)


def _there(pid: int | None, began: float | None, asked: str) -> bool:
    """Whether the process of a row is still that process. One that has not started yet gets a little time."""
    if pid is None or began is None:
        return (datetime.fromisoformat(now()) - datetime.fromisoformat(asked)).total_seconds() < 30
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - began) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start(home: Home, verb: str, arguments: Sequence[str], offline: bool = False) -> str:
    """Start a verb of the command line as a process of its own; returns the job's id. UsageError for other verbs."""
    if verb not in STARTABLE:
        raise UsageError(f"{verb!r} cannot be started as a job", f"These can: {', '.join(STARTABLE)}.")
    folder_of(home).mkdir(parents=True, exist_ok=True)
    given = [*arguments, *(["--offline"] if offline else [])]
    with JobTable(home.store) as table:
        same = next((work for work in table.list(20) if not work.over and (work.verb, work.arguments) == (verb, given)),
                    None)
        if same is not None:
            raise UsageError(f"job {same.id} is doing exactly this", "Wait for it, or cancel it.")
        job = table.add(verb, given, own=True)
        with log_of(home, job).open("wb") as log, output_of(home, job).open("wb") as output:
            process = subprocess.Popen([sys.executable, "-m", "toolkit.worker", str(home.path), job], stdout=output,
                                       stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        table.started(job, process.pid)
    return job


class Recorder:
    """Writes a job's progress into the table: at every new stage, and not more than twice a second.

    It never raises into the work that reports to it: a locked or full disk costs a line on the page, not the work.
    """

    def __init__(self, path: Path, job: str) -> None:
        self._path, self._job = path, job
        self._stage, self._wrote = "", 0.0

    def __call__(self, event: Progress) -> None:
        ended = event.total is not None and event.done >= event.total
        if event.stage == self._stage and not ended and time.monotonic() - self._wrote < EVERY_S:
            return
        self._stage, self._wrote = event.stage, time.monotonic()
        with contextlib.suppress(sqlite3.Error, OSError), JobTable(self._path) as table:
            table.progress(self._job, event)
