"""The store: runs, rows, cells, verdicts, artifacts, releases, jobs and the audit log in one SQLite file.

SQLite in WAL mode: many readers (the page, other terminals) and one writer at a time, no server, one file to copy. Rows
and cells are kept as the JSON of their records (``evals/report.py``) beside the columns that are searched. The natural
key of a run is the digest of everything it depends on, so running a job again finds its run instead of doubling it.

``resolve`` turns an unambiguous digest prefix (6 characters or more) into an artifact; the folder it names is opened
strictly by whoever uses it, so a stale path is an error there and never a wrong result.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.artifact import Artifact
from evals.report import Cell, Estimate, Row, Verdict
from toolkit.audit import AuditEntry, broken_link, next_entry, now
from toolkit.errors import NoRunError, UsageError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS artifacts(digest TEXT PRIMARY KEY, kind TEXT NOT NULL, path TEXT NOT NULL,
    seen TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS runs(id TEXT PRIMARY KEY, job TEXT NOT NULL, status TEXT NOT NULL, started TEXT NOT NULL,
    finished TEXT, facts TEXT NOT NULL, report TEXT);
CREATE INDEX IF NOT EXISTS runs_by_time ON runs(finished);
CREATE TABLE IF NOT EXISTS rows(run TEXT NOT NULL REFERENCES runs(id), position INTEGER NOT NULL,
    engine_digest TEXT NOT NULL, row TEXT NOT NULL, model_delta TEXT, PRIMARY KEY(run, position));
CREATE INDEX IF NOT EXISTS rows_by_engine ON rows(engine_digest);
CREATE TABLE IF NOT EXISTS cells(run TEXT NOT NULL, position INTEGER NOT NULL, ordinal INTEGER NOT NULL,
    cell TEXT NOT NULL, PRIMARY KEY(run, position, ordinal));
CREATE TABLE IF NOT EXISTS verdicts(digest TEXT PRIMARY KEY, engine_digest TEXT NOT NULL, policy TEXT NOT NULL,
    policy_sha256 TEXT NOT NULL, word TEXT NOT NULL, verdict TEXT NOT NULL, path TEXT NOT NULL, at TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS verdicts_by_engine ON verdicts(engine_digest, at);
CREATE TABLE IF NOT EXISTS releases(target TEXT NOT NULL, alias TEXT NOT NULL, digest TEXT NOT NULL,
    engine_digest TEXT NOT NULL, at TEXT NOT NULL, PRIMARY KEY(target, alias));
CREATE TABLE IF NOT EXISTS jobs(run TEXT PRIMARY KEY, pid INTEGER NOT NULL, stage TEXT NOT NULL, done REAL NOT NULL,
    total REAL NOT NULL, began TEXT NOT NULL, updated TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS audit(seq INTEGER PRIMARY KEY, entry TEXT NOT NULL);
"""
SHORTEST_PREFIX = 6


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One engine of a run; ``model_delta`` is the delta NLL of its in-memory fake-quantized model, if scored."""

    row: Row
    model_delta: Estimate | None


@dataclass(frozen=True, slots=True)
class Run:
    """A run without its rows. ``facts``: device, versions, model, policy, what was limited; ``report``: HTML path."""

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


@dataclass(frozen=True, slots=True)
class StoredVerdict:
    digest: str
    verdict: Verdict
    path: Path
    at: str


@dataclass(frozen=True, slots=True)
class Alias:
    target: Path
    alias: str
    digest: str
    engine_digest: str
    at: str


class RunStore:
    """One connection. Use as a context manager, one per thread or process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA foreign_keys=ON")
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise UsageError(f"{path} is not a toolkit store: {error}", "Move the file away, or give another --home."
                             ) from error

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self._db.close()

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # artifacts

    def remember(self, artifact: Artifact) -> None:
        """Make an artifact findable by its digest; the newest place wins."""
        with self._write() as db:
            db.execute("INSERT INTO artifacts VALUES(?,?,?,?) ON CONFLICT(digest) DO UPDATE SET path=excluded.path, "
                       "seen=excluded.seen", (artifact.digest, artifact.kind, str(artifact.path.absolute()), now()))

    def resolve(self, prefix: str) -> tuple[str, Path] | None:
        """(kind, path) of the one artifact whose digest begins so; None if there is none, UsageError if several."""
        if len(prefix) < SHORTEST_PREFIX or set(prefix) - set("0123456789abcdef"):
            return None
        found = self._db.execute("SELECT digest, kind, path FROM artifacts WHERE digest >= ? AND digest < ? LIMIT 4",
                                 (prefix, prefix + "g")).fetchall()
        if len(found) > 1:
            names = ", ".join(f"{row['digest'][:len(prefix) + 4]} ({row['kind']})" for row in found)
            raise UsageError(f"digest prefix {prefix!r} is ambiguous: {names}", "Give more characters.")
        return (found[0]["kind"], Path(found[0]["path"])) if found else None

    # runs

    def begin(self, run: str, job: str, facts: dict[str, Any]) -> None:
        """Start a run, or take up an unfinished or finished one again; its rows stay until ``finish`` replaces them."""
        with self._write() as db:
            db.execute("INSERT INTO runs VALUES(?,?,?,?,NULL,?,NULL) ON CONFLICT(id) DO UPDATE SET status='running', "
                       "facts=excluded.facts", (run, job, "running", now(), json.dumps(facts)))

    def finish(self, run: str, rows: list[StoredRow], report: Path) -> None:
        with self._write() as db:
            for table in ("cells", "rows"):
                db.execute(f"DELETE FROM {table} WHERE run=?", (run,))
            for position, stored in enumerate(rows):
                self._insert_row(db, run, position, stored)
            db.execute("UPDATE runs SET status='finished', finished=?, report=? WHERE id=?", (now(), str(report), run))
            db.execute("DELETE FROM jobs WHERE run=?", (run,))

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
            db.execute("DELETE FROM jobs WHERE run=?", (run,))

    def runs(self, limit: int = 100, offset: int = 0) -> list[Run]:
        """Newest first; unfinished ones before finished ones."""
        found = self._db.execute("SELECT * FROM runs ORDER BY finished IS NOT NULL, finished DESC, started DESC, "
                                 "rowid DESC LIMIT ? OFFSET ?", (limit, offset)).fetchall()
        return [_run(row) for row in found]

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
        return _run(found[0])

    def _no_such_run(self, name: str | None) -> None:
        if name is None:
            raise NoRunError("the store has no finished run", "Make one: toolkit run examples/demo.yaml")
        import difflib

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

    # running jobs

    def job_progress(self, run: str, stage: str, done: float, total: float) -> None:
        with self._write() as db:
            db.execute("INSERT INTO jobs VALUES(?,?,?,?,?,?,?) ON CONFLICT(run) DO UPDATE SET pid=excluded.pid, "
                       "stage=excluded.stage, done=excluded.done, total=excluded.total, updated=excluded.updated",
                       (run, os.getpid(), stage, done, total, now(), now()))

    def running(self) -> list[RunningJob]:
        """Jobs whose process is still there."""
        found = [RunningJob(**dict(row)) for row in self._db.execute("SELECT * FROM jobs ORDER BY began")]
        return [job for job in found if _alive(job.pid)]

    # verdicts

    def add_verdict(self, artifact: Artifact, verdict: Verdict) -> None:
        self.remember(artifact)
        with self._write() as db:
            db.execute("INSERT OR REPLACE INTO verdicts VALUES(?,?,?,?,?,?,?,?)",
                       (artifact.digest, verdict.candidate_digest, verdict.policy, verdict.policy_sha256,
                        verdict.word, verdict.model_dump_json(), str(artifact.path), now()))

    def verdict_of(self, engine_digest: str, policy_sha256: str | None = None) -> StoredVerdict | None:
        """The newest verdict on exactly this engine (under this policy, when one is named)."""
        found = self._db.execute("SELECT * FROM verdicts WHERE engine_digest=? AND (? IS NULL OR policy_sha256=?) "
                                 "ORDER BY at DESC, rowid DESC LIMIT 1",
                                 (engine_digest, policy_sha256, policy_sha256)).fetchone()
        if not found:
            return None
        return StoredVerdict(found["digest"], Verdict.model_validate_json(found["verdict"]), Path(found["path"]),
                             found["at"])

    # releases and audit

    def set_alias(self, target: Path, alias: str, digest: str, engine_digest: str) -> None:
        with self._write() as db:
            db.execute("INSERT OR REPLACE INTO releases VALUES(?,?,?,?,?)",
                       (str(target.absolute()), alias, digest, engine_digest, now()))

    def aliases(self, alias: str | None = None) -> list[Alias]:
        """Known aliases, newest first."""
        found = self._db.execute("SELECT * FROM releases WHERE ? IS NULL OR alias=? ORDER BY at DESC, rowid DESC",
                                 (alias, alias)).fetchall()
        return [Alias(Path(row["target"]), row["alias"], row["digest"], row["engine_digest"], row["at"])
                for row in found]

    def log(self, action: str, subject: str, **detail: str) -> AuditEntry:
        with self._write() as db:
            last = db.execute("SELECT entry FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
            entry = next_entry(AuditEntry.model_validate_json(last["entry"]) if last else None, action, subject, detail)
            db.execute("INSERT INTO audit VALUES(?,?)", (entry.seq, entry.model_dump_json()))
        return entry

    def audit(self) -> list[AuditEntry]:
        """All entries, oldest first; UsageError names the first broken link."""
        entries = [AuditEntry.model_validate_json(row["entry"])
                   for row in self._db.execute("SELECT entry FROM audit ORDER BY seq")]
        if (at := broken_link(entries)) is not None:
            raise UsageError(f"the audit log of {self.path} is broken at entry {at}", "Somebody changed the store.")
        return entries


def _run(row: sqlite3.Row) -> Run:
    return Run(row["id"], row["job"], row["status"], row["started"], row["finished"], json.loads(row["facts"]),
               row["report"])


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
