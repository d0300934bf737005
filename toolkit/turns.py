"""One process at a time: who wants what another one is making waits for it.

The lock is the kernel's (flock on an empty file beside the thing made), so it goes with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from calib.errors import ArtifactError
from calib.progress import Progress, Report


def _lock_file(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.with_name(f".{path.name}.making").open("wb")
    except OSError as error:
        raise ArtifactError(f"cannot write in {path.parent}: {error.strerror or error}",
                            "Make it writable, free disk space, or choose another home with --home.") from error


@contextlib.contextmanager
def alone(path: Path, report: Report) -> Iterator[None]:
    """Hold the right to make ``path``; waiting for another process is reported."""
    with _lock_file(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(Progress("wait for another process", 0, None, "second", f"it makes {path.name}"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
