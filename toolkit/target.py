"""Where releases go: a folder, or any store that fsspec can reach by URL (``s3://bucket/path``, ``memory://x``).

A target is a flat set of named byte strings. What is written is there whole or not at all: on a disk through a
temporary sibling, fsync and rename; an object store puts an object in one piece by itself. One publisher at a time
works on a target: on a disk the kernel's lock says so and dies with its holder; an object store has no such lock, so a
small object says who holds it, is refreshed as work goes on, and is taken over when its holder is dead or silent.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from calib.artifact import write_atomic
from toolkit.errors import ReleaseError

CHUNK = 8 * 1024 * 1024
LOCK = ".lock"
#: Seconds of silence after which the lock of an unknown machine counts as left behind.
SILENT_S = 600.0


def open_target(name: str | Path) -> Target:
    """A folder's or a URL's Target. ReleaseError when the protocol is not known here."""
    text = str(name)
    if "://" not in text:
        return FolderTarget(Path(text).expanduser().absolute())
    if text.startswith("file://"):
        return FolderTarget(Path(text.removeprefix("file://")).absolute())
    return ObjectTarget(text)


def existing_target(name: str | Path) -> Target:
    """The same, for reading: a folder that is not there is an error and not an empty target."""
    target = open_target(name)
    if isinstance(target, FolderTarget) and not target.root.is_dir():
        raise ReleaseError(f"there is no folder {target.root}", "Give the target that `toolkit publish --to` wrote.")
    return target


class Target:
    """Named bytes below one root. Names are relative, with ``/``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, name: str) -> bytes | None:
        """The whole content; None when there is none."""
        raise NotImplementedError

    def write(self, name: str, data: bytes) -> None:
        """Replace the content of a name in one piece."""
        raise NotImplementedError

    def put(self, source: Path, name: str) -> None:
        """Copy a local file there, in one piece."""
        raise NotImplementedError

    def size(self, name: str) -> int | None:
        raise NotImplementedError

    def chunks(self, name: str) -> Iterator[bytes]:
        """The content in pieces; ReleaseError when there is none."""
        raise NotImplementedError

    def names(self, folder: str) -> list[str]:
        """Names directly below ``folder``."""
        raise NotImplementedError

    @contextmanager
    def lock(self) -> Iterator[Any]:
        """Only one holder at a time; yields a function that says "still here"."""
        raise NotImplementedError
        yield

    def sha256(self, name: str) -> str:
        """Hash of what is there, read back byte by byte."""
        found = hashlib.sha256()
        for chunk in self.chunks(name):
            found.update(chunk)
        return found.hexdigest()


class FolderTarget(Target):
    """A folder on this machine (or one that is mounted here)."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.root = root

    def _place(self, name: str) -> Path:
        place = self.root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def read(self, name: str) -> bytes | None:
        place = self.root / name
        return place.read_bytes() if place.is_file() else None

    def write(self, name: str, data: bytes) -> None:
        write_atomic(self._place(name), data)

    def put(self, source: Path, name: str) -> None:
        place = self._place(name)
        partial = place.with_name(f".{place.name}.{os.getpid()}.tmp")
        try:
            with source.open("rb") as read, partial.open("wb") as written:
                while chunk := read.read(CHUNK):
                    written.write(chunk)
                written.flush()
                os.fsync(written.fileno())
            partial.replace(place)
        finally:
            partial.unlink(missing_ok=True)

    def size(self, name: str) -> int | None:
        place = self.root / name
        return place.stat().st_size if place.is_file() else None

    def chunks(self, name: str) -> Iterator[bytes]:
        place = self.root / name
        if not place.is_file():
            raise ReleaseError(f"{self.name} has no {name}", "It was removed; publish again.")
        with place.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk

    def names(self, folder: str) -> list[str]:
        place = self.root / folder
        return sorted(path.name for path in place.iterdir() if not path.name.startswith(".")) if place.is_dir() else []

    @contextmanager
    def lock(self) -> Iterator[Any]:
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / LOCK).open("wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ReleaseError(f"another process is publishing to {self.name}", "Wait for it.") from error
            yield lambda: None


class ObjectTarget(Target):
    """Any fsspec file system by URL. Its credentials are its own library's business; none are stored or printed."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        super().__init__(url.rstrip("/"))
        try:
            self._fs, self._root = url_to_fs(self.name)
        except (ValueError, ImportError) as error:
            raise ReleaseError(f"{url} cannot be reached from here: {error}",
                               "Install the package that fsspec names for this protocol.") from error
        self._root = self._root.rstrip("/")

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read(self, name: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(self._key(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(self._key(name), data)

    def put(self, source: Path, name: str) -> None:
        self._fs.put_file(str(source), self._key(name))

    def size(self, name: str) -> int | None:
        self._fs.invalidate_cache()
        try:
            return int(self._fs.info(self._key(name))["size"])
        except FileNotFoundError:
            return None

    def chunks(self, name: str) -> Iterator[bytes]:
        try:
            with self._fs.open(self._key(name), "rb", block_size=CHUNK) as file:
                while chunk := file.read(CHUNK):
                    yield chunk
        except FileNotFoundError as error:
            raise ReleaseError(f"{self.name} has no {name}", "It was removed; publish again.") from error

    def names(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return sorted(path.rsplit("/", 1)[-1] for path in self._fs.ls(self._key(folder), detail=False))
        except FileNotFoundError:
            return []

    @contextmanager
    def lock(self) -> Iterator[Any]:
        me = {"host": socket.gethostname(), "pid": os.getpid()}
        held = self.read(LOCK)
        if held and (other := _holder(held)) and _holds(other, me):
            raise ReleaseError(f"process {other['pid']} on {other['host']} is publishing to {self.name}",
                               f"Wait for it; after {SILENT_S / 60:.0f} minutes of silence its lock is taken over.")

        def still_here() -> None:
            self.write(LOCK, json.dumps(me | {"at": time.time()}).encode())

        still_here()
        try:
            yield still_here
        finally:
            self._fs.rm_file(self._key(LOCK))


def _holder(content: bytes) -> dict[str, Any] | None:
    """Who a lock object names; None when it says nothing that can be read, which nobody can be holding."""
    try:
        found = json.loads(content)
        return found if {"host", "pid", "at"} <= set(found) else None
    except (ValueError, TypeError):
        return None


def _holds(other: dict[str, Any], me: dict[str, Any]) -> bool:
    if other["host"] == me["host"]:
        return other["pid"] != me["pid"] and psutil.pid_exists(int(other["pid"]))
    return time.time() - float(other["at"]) < SILENT_S
