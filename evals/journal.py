"""Work that survives being killed: an append-only file of finished items, bound to a key.

The first line is {"key": ...}: everything that decides the numbers. A journal with another key belongs to other work
and is started over; one with the same key is continued, so nothing that was paid for is paid for twice and nothing is
reused silently. Each ``add`` is one line {"sha256": ..., "values": {id: value}}, flushed to disk: a batch is there
whole or not at all (from a torn or changed line on, everything is cut off), so work that goes on forms the very batches
it would have formed, bit for bit. An advisory lock keeps two processes from writing one journal.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from calib.artifact import canonical_json
from calib.kept import sealed, unsealed
from evals.errors import EvalError


class Journal:
    """Context manager. ``done`` maps the id of each finished item to its record."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.done: dict[str, Any] = {}
        self._file: BinaryIO | None = None

    def __enter__(self) -> Journal:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise EvalError(f"another process is working in {self.path.parent}",
                            "Wait for it, or choose another output folder.") from error
        self._file = file
        self._read(file)
        return self

    def _read(self, file: BinaryIO) -> None:
        file.seek(0)
        lines = file.read().split(b"\n")[:-1]
        if not lines or _parsed(lines[0]) != {"key": self.key}:
            file.truncate(0)
            self._append(canonical_json({"key": self.key}))
            return
        whole = len(lines[0]) + 1
        for line in lines[1:]:
            values = unsealed(_parsed(line))
            if values is None:  # what follows a damaged line is done again, in its order
                break
            self.done.update(values)
            whole += len(line) + 1
        file.truncate(whole)

    def add(self, values: Mapping[str, Any]) -> None:
        """Write finished items down: JSON values by id (NaN is refused)."""
        self._append(canonical_json(sealed(values)))
        self.done.update(values)

    def _append(self, line: bytes) -> None:
        assert self._file is not None, "the journal is not open"
        self._file.write(line + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def drop(self, ids: Iterable[str]) -> None:
        """Forget items whose other files are gone or changed: they are to be done again."""
        for identity in ids:
            self.done.pop(identity, None)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _parsed(line: bytes) -> Any:
    """A line's document; None for bytes that are none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
