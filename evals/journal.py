"""Work that survives being killed: an append-only file of finished items, bound to a key.

The first line is {"key": ...}: everything that decides the numbers. A journal with another key belongs to other work
and is started over; one with the same key is continued, so nothing that was paid for is paid for twice and nothing is
reused silently. Each ``add`` is one line {"values": {id: value}}, flushed to disk: a batch is there whole or not at all
(a torn last line is cut off), so work that goes on forms the very batches it would have formed, bit for bit.
An advisory lock keeps two processes from writing one journal.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from calib.artifact import canonical_json
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
        if not lines or json.loads(lines[0]).get("key") != self.key:
            file.truncate(0)
            self._append(canonical_json({"key": self.key}))
            return
        file.truncate(sum(len(line) + 1 for line in lines))
        for line in lines[1:]:
            self.done.update(json.loads(line)["values"])

    def add(self, values: Mapping[str, Any]) -> None:
        """Write finished items down: JSON values by id (NaN is refused)."""
        self._append(canonical_json({"values": dict(values)}))
        self.done.update(values)

    def _append(self, line: bytes) -> None:
        assert self._file is not None, "the journal is not open"
        self._file.write(line + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
