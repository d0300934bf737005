"""One SQLite file, opened so that many can read while one writes.

WAL mode, foreign keys, a busy timeout instead of a failure, transactions that are whole or not at all. The schema is
made when a file is opened, so a new home needs no step of its own.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from toolkit.errors import StoreError, UsageError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS artifacts(digest TEXT PRIMARY KEY, kind TEXT NOT NULL, path TEXT NOT NULL,
    seen TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS parents(parent TEXT NOT NULL, child TEXT NOT NULL, PRIMARY KEY(parent, child))
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS runs(id TEXT PRIMARY KEY, job TEXT NOT NULL, status TEXT NOT NULL, started TEXT NOT NULL,
    finished TEXT, facts TEXT NOT NULL, report TEXT);
CREATE INDEX IF NOT EXISTS runs_by_time ON runs(finished);
CREATE INDEX IF NOT EXISTS runs_by_job ON runs(job, finished);
CREATE TABLE IF NOT EXISTS rows(run TEXT NOT NULL REFERENCES runs(id), position INTEGER NOT NULL,
    engine_digest TEXT NOT NULL, row TEXT NOT NULL, model_delta TEXT, PRIMARY KEY(run, position));
CREATE INDEX IF NOT EXISTS rows_by_engine ON rows(engine_digest);
CREATE TABLE IF NOT EXISTS cells(run TEXT NOT NULL, position INTEGER NOT NULL, ordinal INTEGER NOT NULL,
    cell TEXT NOT NULL, PRIMARY KEY(run, position, ordinal));
CREATE TABLE IF NOT EXISTS progress(run TEXT PRIMARY KEY, pid INTEGER NOT NULL, stage TEXT NOT NULL,
    done REAL NOT NULL, total REAL NOT NULL, began TEXT NOT NULL, updated TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS verdicts(digest TEXT PRIMARY KEY, engine_digest TEXT NOT NULL, policy TEXT NOT NULL,
    policy_sha256 TEXT NOT NULL, word TEXT NOT NULL, verdict TEXT NOT NULL, path TEXT NOT NULL, at TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS verdicts_by_engine ON verdicts(engine_digest, at);
CREATE TABLE IF NOT EXISTS releases(target TEXT NOT NULL, alias TEXT NOT NULL, digest TEXT NOT NULL,
    engine_digest TEXT NOT NULL, at TEXT NOT NULL, PRIMARY KEY(target, alias));
CREATE TABLE IF NOT EXISTS audit(seq INTEGER PRIMARY KEY, entry TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS work(id TEXT PRIMARY KEY, verb TEXT NOT NULL, arguments TEXT NOT NULL, state TEXT NOT NULL,
    asked TEXT NOT NULL, began TEXT, ended TEXT, exit_code INTEGER, pid INTEGER, pid_began REAL, own INTEGER NOT NULL,
    stage TEXT NOT NULL, done REAL NOT NULL, total REAL, unit TEXT NOT NULL, stage_began TEXT, updated TEXT,
    cancel TEXT);
CREATE INDEX IF NOT EXISTS work_by_time ON work(asked);
"""


#: How long one process waits for another's use of the file.
_PATIENCE_S = 30.0


def _write_ahead(db: sqlite3.Connection) -> None:
    """Switch to a write-ahead log. Of processes that open a new file at once one switches, and SQLite tells the others
    at once that it is locked, whatever they would wait otherwise."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.02)


class Database:
    """One connection. Use as a context manager, one per thread or process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        try:
            self._db = sqlite3.connect(path, timeout=_PATIENCE_S, isolation_level=None)
        except sqlite3.OperationalError as error:
            raise StoreError(f"{path} cannot be opened: {error}", "Check the folder's permissions, or give another "
                             "--home.") from error
        self._db.row_factory = sqlite3.Row
        try:
            _write_ahead(self._db)
            self._db.execute("PRAGMA foreign_keys=ON")
            self._db.executescript(_SCHEMA)
        except sqlite3.OperationalError as error:  # locked, read-only, no space: the file itself may be well
            self._db.close()
            raise StoreError(f"{path} cannot be used: {error}", "Check its permissions and the free disk space, or "
                             "give another --home.") from error
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise UsageError(f"{path} is not a toolkit store: {error}", "Move the file away, or give another --home."
                             ) from error

    def __enter__(self) -> Self:
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
