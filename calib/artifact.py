"""Artifact: a folder with a manifest, a content digest and parents; written atomically, opened strictly.

``manifest.json`` holds ``kind``, ``format``, ``digest``, ``parents``, ``record``, ``files``, ``created``, ``versions``.
The digest is the sha256 of the canonical JSON (sorted keys, no spaces, UTF-8) of {kind, format, parents, record,
files that are not evidence}: the same inputs give the same digest, whatever the clock said. Times, memory figures and
logs are *evidence*: hashed in the manifest, outside the digest.

A file's hash is the sha256 over the concatenated sha256 digests of its 64 MiB chunks, so that chunks can be hashed in
parallel with reading and checked one by one on resume.

Here an artifact is described and opened; ``calib/artifact_writer.py`` writes one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import IO, Any

from pydantic import ValidationError

from calib.errors import ArtifactError
from calib.faults import fault_words
from calib.json_text import parse_object
from calib.scheme import Frozen

CHUNK = 64 * 1024 * 1024
MANIFEST = "manifest.json"
KINDS = frozenset({"calibration-set", "quantized-checkpoint", "engine", "prepared-engine", "eval-report",
                   "latency-sweep", "baseline", "search", "sensitivity", "drafter", "verdict", "release"})
_AGAIN = "Copy the artifact again, or make it again."
_VERSIONED = ("torch", "triton", "transformers", "nvidia-modelopt", "lm_eval", "numpy")


class FileEntry(Frozen):
    """One file of an artifact: chunked sha256 (hex), size in bytes, and whether it is evidence only."""

    sha256: str
    bytes: int
    evidence: bool = False


class Manifest(Frozen):
    """The content of manifest.json. ``files`` maps relative POSIX paths to entries."""

    kind: str
    format: int
    digest: str
    parents: list[str]
    record: dict[str, Any]
    files: dict[str, FileEntry]
    created: str
    versions: dict[str, str]


def canonical_json(value: Any) -> bytes:
    """Sorted keys, no spaces, UTF-8; NaN and infinity are refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """sha256 over the sha256 digests of the file's 64 MiB chunks (an empty file has one empty chunk)."""
    with path.open("rb") as file:
        return stream_sha256(file)


def stream_sha256(file: IO[bytes]) -> str:
    """``file_sha256`` of what is left to read; ``read`` must give as much as it is asked for."""
    whole = hashlib.sha256()
    chunk = file.read(CHUNK)
    whole.update(hashlib.sha256(chunk).digest())
    while chunk := file.read(CHUNK):
        whole.update(hashlib.sha256(chunk).digest())
    return whole.hexdigest()


def digest_of(kind: str, format: int, parents: Sequence[str], record: Mapping[str, Any],
              files: Mapping[str, FileEntry]) -> str:
    content = {name: {"sha256": entry.sha256, "bytes": entry.bytes} for name, entry in files.items()
               if not entry.evidence}
    return sha256_hex(canonical_json({"kind": kind, "format": format, "parents": list(parents),
                                      "record": dict(record), "files": content}))


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers may depend on; absent packages are left out."""
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file next to its place, flush it to disk, then rename it there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def safe_name(name: str) -> str:
    """The name itself. ArtifactError when it is no plain relative path: it could leave the artifact."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\\" in name or str(pure) != name:
        raise ArtifactError(f"file path {name!r} leaves its artifact",
                            "Paths in a manifest are relative, without '..'.")
    return name


def scan_files(folder: Path) -> dict[str, Path]:
    """Relative name -> place of every file but the manifest. ArtifactError for links, pipes and the like."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise ArtifactError(f"{name} in {folder} is a link", "Artifacts hold files only; copy the target instead.")
        if not path.is_file() and not path.is_dir():
            raise ArtifactError(f"{name} in {folder} is no plain file", "Artifacts hold files only; remove it.")
        if path.is_file() and name != MANIFEST:
            found[name] = path
    return found


def parse_manifest(data: bytes, where: str, hint: str = _AGAIN) -> Manifest:
    """A manifest.json's content. ArtifactError names ``where`` and the key that is wrong, missing or there twice."""
    content = parse_object(data, where, ArtifactError, hint)
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ArtifactError(f"{where} is damaged: {place}: {fault_words(first)}", hint) from error


def is_artifact(folder: Path) -> bool:
    """Whether a manifest of ours lies there; other tools have files of that name too."""
    try:
        Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Artifact:
    """An opened, complete artifact. Opening checks names, sizes and the digest; ``check`` re-reads what is used."""

    path: Path
    manifest: Manifest

    @property
    def kind(self) -> str:
        return self.manifest.kind

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def record(self) -> dict[str, Any]:
        return self.manifest.record

    @property
    def parents(self) -> list[str]:
        return self.manifest.parents

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, the manifest excluded."""
        return sum(entry.bytes for entry in self.manifest.files.values())

    def file(self, name: str) -> Path:
        if name not in self.manifest.files:
            raise ArtifactError(f"{self.path} has no file {name!r}", "Its manifest does not list it; rebuild it.")
        return self.path / safe_name(name)

    @classmethod
    def open(cls, path: Path | str, kind: str | None = None, format: int | None = None) -> Artifact:
        """Strict open: ArtifactError names what is missing, resized, unlisted or of another kind."""
        path = Path(path)
        manifest_path = path / MANIFEST
        if not manifest_path.is_file():
            raise ArtifactError(f"{path} is not an artifact: no {MANIFEST}",
                                "Give the folder that a toolkit command wrote with --out.")
        try:
            manifest = parse_manifest(manifest_path.read_bytes(), str(manifest_path))
        except OSError as error:
            raise ArtifactError(f"{manifest_path} cannot be read: {error.strerror or error}", _AGAIN) from error
        if kind is not None and manifest.kind != kind:
            raise ArtifactError(f"{path} is a {manifest.kind}, not a {kind}", f"Give the folder of a {kind}.")
        if format is not None and manifest.format != format:
            raise ArtifactError(f"{path} has format {manifest.format} of {manifest.kind}; this toolkit reads {format}",
                                "Make it again with this version of the toolkit.")
        artifact = cls(path, manifest)
        artifact._check_names_and_sizes()
        expected = digest_of(manifest.kind, manifest.format, manifest.parents, manifest.record, manifest.files)
        if expected != manifest.digest:
            raise ArtifactError(f"{manifest_path} says digest {manifest.digest[:12]} but its content gives "
                                f"{expected[:12]}", "The manifest was changed after writing; make the artifact again.")
        return artifact

    def _check_names_and_sizes(self) -> None:
        present = scan_files(self.path)
        for name, entry in self.manifest.files.items():
            safe_name(name)
            if name not in present:
                raise ArtifactError(f"{self.path / name} is missing", "Copy the artifact again, or make it again.")
            found = present[name].stat().st_size
            if found != entry.bytes:
                raise ArtifactError(f"{self.path / name} has {found} bytes, its manifest says {entry.bytes}",
                                    "The file is truncated or changed; copy the artifact again.")
        extra = sorted(set(present) - set(self.manifest.files))
        if extra:
            raise ArtifactError(f"{self.path} holds a file that its manifest does not list: {extra[0]}",
                                "Remove it, or make the artifact again.")

    def check(self, names: Iterable[str]) -> None:
        """Re-hash files before their content is used; ArtifactError names the first whose bytes are not the manifest's.

        Opening sees sizes only, and one flipped bit in a scale is a model that runs and is wrong.
        """
        if changed := self.verify(names):
            raise ArtifactError(f"{self.path / changed[0]} was changed after it was written: its bytes are not those "
                                "that the manifest names", "Copy the artifact again, or make it again.")

    def verify(self, names: Iterable[str] | None = None) -> list[str]:
        """Re-hash files (every one by default), several in parallel. Returns the names of files that changed."""
        names = list(self.manifest.files if names is None else names)
        with ThreadPoolExecutor(max_workers=min(8, max(1, len(names)))) as pool:
            hashes = list(pool.map(lambda name: file_sha256(self.path / name), names))
        return [name for name, found in zip(names, hashes, strict=True) if found != self.manifest.files[name].sha256]
