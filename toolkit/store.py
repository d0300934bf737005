"""The store: runs, rows and cells in one SQLite file (``database``), beside what is known of artifacts (``ledger``).

Rows and cells are kept as the JSON of their records (``evals/report.py``) beside the columns that are searched. The
natural key of a run is the digest of everything it depends on, so running a job again finds its run instead of
doubling it. Lists are read a page at a time: a store of thousands of runs opens as fast as one of ten.
"""

from __future__ import annotations

import difflib
import json
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.report import Cell, Estimate, Row
from toolkit.audit import now
from toolkit.errors import NoRunError, UsageError
from toolkit.ledger import Alias, Ledger, StoredVerdict

__all__ = ["Alias", "Run", "RunStore", "RunningJob", "StoredRow", "StoredVerdict", "alive"]


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One engine of a run; ``model_delta`` is the delta NLL of its in-memory fake-quantized model, if scored."""

    row: Row
    model_delta: Estimate | None


@dataclass(frozen=True, slots=True)
class Run:
    """A run without its rows. ``facts``: device, versions, model, policy, what was limited; ``report``: HTML path.

    ``status``: running, finished, stopped (an error, Ctrl-C), or killed: it says running, but its process is gone.
    """

    id: str
    job: str
    status: str
    started: str
    finished: str | None
    facts: dict[str, Any]
    report: str | None


@dataclass(frozen=True, slots=True)
class RunningJob:
    """How far a run is that goes on now, in this or another process."""

    run: str
    pid: int
    stage: str
    done: float
    total: float
    began: str
    updated: str


_MATCH = ("(? = '' OR instr(lower(id), ?) OR instr(lower(job), ?) OR instr(lower(json_extract(facts, '$.model')), ?)) "
          "AND (NOT ? OR finished IS NOT NULL)")


def _matching(search: str, finished: bool) -> tuple[str, str, str, str, bool]:
    text = search.strip().lower()
    return text, text, text, text, finished


class RunStore(Ledger):
    """Runs with their rows and cells, and how far the running ones are."""

    def begin(self, run: str, job: str, facts: dict[str, Any]) -> None:
        """Start a run, or take up an unfinished or finished one again; its rows stay until ``finish`` replaces them."""
        at = now()
        with self._write() as db:
            db.execute("INSERT INTO runs VALUES(?,?,?,?,NULL,?,NULL) ON CONFLICT(id) DO UPDATE SET status='running', "
                       "facts=excluded.facts", (run, job, "running", at, json.dumps(facts)))
            db.execute("INSERT OR REPLACE INTO progress VALUES(?,?,?,?,?,?,?)",
                       (run, os.getpid(), "begin", 0.0, 1.0, at, at))

    def finish(self, run: str, rows: list[StoredRow], report: Path) -> None:
        with self._write() as db:
            for table in ("cells", "rows"):
                db.execute(f"DELETE FROM {table} WHERE run=?", (run,))
            for position, stored in enumerate(rows):
                self._insert_row(db, run, position, stored)
            db.execute("UPDATE runs SET status='finished', finished=?, report=? WHERE id=?", (now(), str(report), run))
            db.execute("DELETE FROM progress WHERE run=?", (run,))

    @staticmethod
    def _insert_row(db: sqlite3.Connection, run: str, position: int, stored: StoredRow) -> None:
        row = stored.row.model_copy(update={"cells": []})
        delta = stored.model_delta.model_dump_json() if stored.model_delta else None
        db.execute("INSERT INTO rows VALUES(?,?,?,?,?)",
                   (run, position, row.engine_digest, row.model_dump_json(), delta))
        db.executemany("INSERT INTO cells VALUES(?,?,?,?)",
                       [(run, position, ordinal, cell.model_dump_json())
                        for ordinal, cell in enumerate(stored.row.cells)])

    def fail(self, run: str) -> None:
        """The run stopped (error, Ctrl-C); what it made stays, and the next start goes on."""
        with self._write() as db:
            db.execute("UPDATE runs SET status='stopped' WHERE id=? AND status='running'", (run,))
            db.execute("DELETE FROM progress WHERE run=?", (run,))

    def runs(self, limit: int = 100, offset: int = 0, search: str = "", finished: bool = False) -> list[Run]:
        """One page, newest first; unfinished runs before finished ones. ``search``: part of an id, job or model."""
        order = "finished DESC, rowid DESC" if finished else (
            "finished IS NOT NULL, finished DESC, started DESC, rowid DESC")  # the first one follows an index
        found = self._db.execute(f"SELECT * FROM runs WHERE {_MATCH} ORDER BY {order} LIMIT ? OFFSET ?",
                                 (*_matching(search, finished), limit, offset)).fetchall()
        return [self._run(row) for row in found]

    def count_runs(self, search: str = "", finished: bool = False) -> int:
        return int(self._db.execute(f"SELECT count(*) FROM runs WHERE {_MATCH}", _matching(search, finished)
                                    ).fetchone()[0])

    def find_run(self, name: str | None = None) -> Run:
        """None: the newest finished run. A job's name: its newest run. Else an id or its unambiguous prefix."""
        if name is None:
            found = self._db.execute("SELECT * FROM runs WHERE status='finished' ORDER BY finished DESC, rowid DESC "
                                     "LIMIT 1").fetchall()
        else:
            found = self._db.execute("SELECT * FROM runs WHERE job=? ORDER BY status='finished' DESC, finished DESC, "
                                     "started DESC, rowid DESC LIMIT 1", (name,)).fetchall()
            found = found or self._db.execute("SELECT * FROM runs WHERE substr(id, 1, ?)=? LIMIT 3",
                                              (len(name), name)).fetchall()
        if not found:
            self._no_such_run(name)
        if len(found) > 1:
            raise UsageError(f"run id {name!r} is ambiguous: {', '.join(row['id'] for row in found)}",
                             "Give more characters.")
        return self._run(found[0])

    def _no_such_run(self, name: str | None) -> None:
        if name is None:
            raise NoRunError("the store has no finished run", "Make one: toolkit run examples/demo.yaml")
        known = [row[0] for row in self._db.execute("SELECT DISTINCT job FROM runs UNION SELECT id FROM runs")]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        raise NoRunError(f"no run or job {name!r} in {self.path}",
                         f"Did you mean {near[0]!r}?" if near else "List them: toolkit runs ls")

    def rows(self, run: str) -> list[StoredRow]:
        cells: dict[int, list[Cell]] = {}
        for found in self._db.execute("SELECT position, cell FROM cells WHERE run=? ORDER BY position, ordinal",
                                      (run,)):
            cells.setdefault(found["position"], []).append(Cell.model_validate_json(found["cell"]))
        rows = []
        for found in self._db.execute("SELECT * FROM rows WHERE run=? ORDER BY position", (run,)):
            row = Row.model_validate_json(found["row"]).model_copy(update={"cells": cells.get(found["position"], [])})
            delta = Estimate.model_validate_json(found["model_delta"]) if found["model_delta"] else None
            rows.append(StoredRow(row, delta))
        return rows

    def row_of_engine(self, engine_digest: str) -> tuple[Run, StoredRow] | None:
        """The newest finished run's row for this engine, if any."""
        found = self._db.execute("SELECT rows.run, rows.position FROM rows JOIN runs ON runs.id = rows.run WHERE "
                                 "engine_digest=? ORDER BY runs.finished DESC LIMIT 1", (engine_digest,)).fetchone()
        if not found:
            return None
        names = [row[0] for row in self._db.execute("SELECT position FROM rows WHERE run=? ORDER BY position",
                                                    (found["run"],))]
        return self.find_run(found["run"]), self.rows(found["run"])[names.index(found["position"])]

    def job_progress(self, run: str, stage: str, done: float, total: float) -> None:
        with self._write() as db:
            db.execute("INSERT INTO progress VALUES(?,?,?,?,?,?,?) ON CONFLICT(run) DO UPDATE SET pid=excluded.pid, "
                       "stage=excluded.stage, done=excluded.done, total=excluded.total, updated=excluded.updated",
                       (run, os.getpid(), stage, done, total, now(), now()))

    def running(self) -> list[RunningJob]:
        """Jobs whose process is still there."""
        found = [RunningJob(**dict(row)) for row in self._db.execute("SELECT * FROM progress ORDER BY began")]
        return [job for job in found if alive(job.pid)]

    def _run(self, row: sqlite3.Row) -> Run:
        status = row["status"]
        if status == "running":
            found = self._db.execute("SELECT pid FROM progress WHERE run=?", (row["id"],)).fetchone()
            status = "running" if found and alive(found["pid"]) else "killed"
        return Run(row["id"], row["job"], status, row["started"], row["finished"], json.loads(row["facts"]),
                   row["report"])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
