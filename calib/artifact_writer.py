"""Writing an artifact: whole, or not at all.

A writer works in a temporary sibling folder, hashes what it finds there, and renames the folder last, so a half-written
artifact can never be opened; an advisory lock on a sibling file keeps two processes from writing one folder. What an
artifact is: ``calib/artifact.py``.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from safetensors import SafetensorError

from calib.artifact import (
    KINDS,
    MANIFEST,
    Artifact,
    FileEntry,
    Manifest,
    digest_of,
    file_sha256,
    installed_versions,
    is_artifact,
    safe_name,
    scan_files,
    write_atomic,
)
from calib.errors import ArtifactError

_FULL = "Free disk space or choose another folder; nothing half-written was left."


class ArtifactWriter:
    """Context manager: fill ``folder``, set ``record``; leaving without an error publishes the artifact at ``path``.

    An existing artifact at ``path`` is replaced only with ``replace=True``; a folder that is no artifact never is.
    """

    def __init__(self, path: Path | str, kind: str, format: int = 1, parents: Sequence[str] = (), *,
                 replace: bool = False) -> None:
        if kind not in KINDS:
            raise ValueError(f"unknown artifact kind {kind!r}")
        self.path = Path(path).absolute()
        self.kind, self.format, self.parents, self.replace = kind, format, list(parents), replace
        self.record: dict[str, Any] = {}
        self.folder = self.path.with_name(f".{self.path.name}.partial")
        self.artifact: Artifact | None = None
        self._evidence: set[str] = set()
        self._lock: BinaryIO | None = None

    def evidence(self, name: str) -> Path:
        """The place for a file that is hashed but stays outside the digest (times, memory, logs)."""
        self._evidence.add(safe_name(name))
        place = self.folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def __enter__(self) -> ArtifactWriter:
        self._refuse_inside()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self.path.with_name(f".{self.path.name}.lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ArtifactError(f"another process is writing {self.path}", "Wait for it, or choose another folder."
                                ) from error
        try:
            old = self.path.with_name(f".{self.path.name}.old")
            if old.exists() and not self.path.exists():  # killed between the two renames of a replacement
                old.rename(self.path)
            self._refuse_or_clear()
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
        except BaseException:
            self._unlock()
            raise
        return self

    def refuse_place(self) -> None:
        """ArtifactError where nothing may be written: asked before hours of work, and again when it is written."""
        self._refuse_inside()
        self._refuse_or_clear()

    def _refuse_inside(self) -> None:
        """A file more, and the artifact around it would not open again."""
        for folder in self.path.parents:
            if is_artifact(folder):
                raise ArtifactError(f"{self.path} lies inside the artifact {folder}", "Choose a folder outside of it.")

    def _refuse_or_clear(self) -> None:
        if not self.path.exists():
            return
        empty = self.path.is_dir() and not any(self.path.iterdir())
        if not empty and not (self.replace and (self.path / MANIFEST).is_file()):
            raise ArtifactError(f"{self.path} already exists", "Choose another folder, or remove that one first.")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.artifact = self._publish()
        except OSError as fault:
            raise ArtifactError(f"cannot write {self.path}: {fault.strerror or fault}", _FULL) from fault
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._unlock()
        if isinstance(error, SafetensorError) and "I/O error" in str(error):
            said = str(error).rpartition("I/O error: ")[2]
            raise ArtifactError(f"cannot write {self.path}: {said}", _FULL) from error
        if isinstance(error, OSError):
            about = f" ({error.filename})" if error.filename else ""
            raise ArtifactError(f"cannot write {self.path}: {error.strerror or error}{about}", _FULL) from error

    def _publish(self) -> Artifact:
        found = scan_files(self.folder)
        with ThreadPoolExecutor(max_workers=8) as pool:
            hashes = dict(zip(found, pool.map(file_sha256, found.values()), strict=True))
        files = {name: FileEntry(sha256=hashes[name], bytes=path.stat().st_size, evidence=name in self._evidence)
                 for name, path in found.items()}
        digest = digest_of(self.kind, self.format, self.parents, self.record, files)
        manifest = Manifest(kind=self.kind, format=self.format, digest=digest, parents=self.parents,
                            record=self.record, files=files, versions=installed_versions(),
                            created=datetime.now(UTC).isoformat(timespec="seconds"))
        write_atomic(self.folder / MANIFEST, manifest.model_dump_json(indent=1).encode())
        if self.path.exists():
            old = self.path.with_name(f".{self.path.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            self.path.rename(old)
            self.folder.rename(self.path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            self.folder.rename(self.path)
        return Artifact.open(self.path, self.kind)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
