"""An engine as one file, for copying: a zip archive without compression, in which nothing can run.

    manifest.json                 first, so that a reader knows what it will see
    every file of the manifest    in the order of their names, stored as they are

The members are safetensors, JSON and text. The same engine gives the same bytes: names are sorted, times and owners are
left out. Any zip tool can list and unpack it.

A file from elsewhere is not trusted. Its names must be exactly those of the manifest it holds (relative, without
``..``, each once, no links, nothing compressed or encrypted), and its sizes those that the manifest names; no byte
stands before, between or behind what ``pack`` writes (``toolkit.zip_layout``); bytes are hashed while they are copied;
the folder gets its name last. Source of the format: PKWARE's APPNOTE.TXT, version 6.3.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import zipfile
from pathlib import Path, PurePosixPath

from calib.artifact import MANIFEST, Artifact, Manifest, file_sha256, parse_manifest, stream_sha256, write_atomic
from calib.errors import ArtifactError
from calib.progress import Progress, Report, silent
from toolkit.turns import alone
from toolkit.zip_layout import ATTRIBUTES, EPOCH, UNIX, UTF8, odd_place

#: What a zip archive begins with.
MAGIC = b"PK\x03\x04"
_PIECE = 1 << 20
_MANIFEST_BYTES = 256 << 20
_HINT = "Copy the file again, or pack the engine again."


def is_packed(path: Path) -> bool:
    """Whether a file begins as a packed engine does."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def pack(artifact: Artifact, out: Path, report: Report = silent) -> Path:
    """Write an artifact as one file, which must not exist. ArtifactError when its folder is not what its manifest says.
    """
    if out.exists():
        raise ArtifactError(f"{out} already exists", "Choose another file, or remove that one first.")
    if changed := artifact.verify():
        raise ArtifactError(f"{artifact.path / changed[0]} was changed after it was made", "Build the engine again.")
    names = [MANIFEST, *sorted(artifact.manifest.files)]
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
            for number, name in enumerate(names):
                report(Progress("pack", number, len(names), "file", name))
                _add(archive, artifact.path / name, name)
        partial.replace(out)
    except OSError as error:
        raise ArtifactError(f"cannot write {out}: {error.strerror or error}", "Free disk space or choose another place."
                            ) from error
    finally:
        partial.unlink(missing_ok=True)
    report(Progress("pack", len(names), len(names), "file"))
    return out


def _add(archive: zipfile.ZipFile, path: Path, name: str) -> None:
    member = zipfile.ZipInfo(name, EPOCH)
    member.create_system, member.external_attr = UNIX, ATTRIBUTES
    member.file_size = path.stat().st_size
    with path.open("rb") as source, archive.open(member, "w") as written:
        shutil.copyfileobj(source, written, _PIECE)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a packed file, whose list of members agrees with it. ArtifactError in words."""
    with _opened(path) as archive:
        return _checked(archive, path)


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:  # that one: of a later zip version
        raise ArtifactError(f"{path} is no packed engine: {error}", _HINT) from error


def _checked(archive: zipfile.ZipFile, path: Path) -> Manifest:
    members = {member.filename: member for member in archive.infolist()}
    if len(members) != len(archive.infolist()) or MANIFEST not in members:
        raise ArtifactError(f"{path} holds {'a name twice' if MANIFEST in members else f'no {MANIFEST}'}", _HINT)
    if members[MANIFEST].file_size > _MANIFEST_BYTES:
        raise ArtifactError(f"{path} has a manifest of {members[MANIFEST].file_size:,} bytes", _HINT)
    for name, member in members.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise ArtifactError(f"file path {name[:200]!r} in {path} leaves its artifact", "Do not use this file.")
        kind = stat.S_IFMT(member.external_attr >> 16)
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & ~UTF8 or kind not in (0, stat.S_IFREG):
            raise ArtifactError(f"{name[:200]!r} in {path} is compressed, encrypted or no plain file", _HINT)
    if sum(member.file_size for member in members.values()) > path.stat().st_size:
        raise ArtifactError(f"{path} says it holds more bytes than it has", "Do not use this file.")
    try:
        manifest = parse_manifest(archive.read(MANIFEST), f"{MANIFEST} in {path}", _HINT)
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise ArtifactError(f"{MANIFEST} in {path} cannot be read: {_said(error)}", _HINT) from error
    listed = {name: entry.bytes for name, entry in manifest.files.items()}
    found = {name: member.file_size for name, member in members.items() if name != MANIFEST}
    if listed != found:
        odd = sorted(listed.items() ^ found.items())[0][0]
        raise ArtifactError(f"{path} does not hold what its manifest lists: {odd[:200]!r}", _HINT)
    if list(members) != [MANIFEST, *sorted(listed)]:
        raise ArtifactError(f"{path} holds its files in another order than they are packed in", _HINT)
    if place := odd_place(archive, path):
        raise ArtifactError(f"{path} is not as it was packed: {place}", _HINT)
    return manifest


def _said(error: Exception) -> str:
    """zipfile's words; at the end of a file it has none."""
    return next(iter(str(error).splitlines()), "it is cut off")


def unpack(path: Path, out: Path, report: Report = silent) -> Artifact:
    """Write a packed file's artifact at ``out``, which must not exist, every byte checked. ArtifactError in words."""
    if out.exists():
        raise ArtifactError(f"{out} already exists", "Choose another folder, or remove that one first.")
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with _opened(path) as archive:
            manifest = _checked(archive, path)
            partial.mkdir(parents=True)
            (partial / MANIFEST).write_bytes(archive.read(MANIFEST))
            for number, (name, entry) in enumerate(manifest.files.items()):
                report(Progress("unpack", number, len(manifest.files), "file", name))
                place = partial / name
                place.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as source, place.open("wb") as written:
                    shutil.copyfileobj(source, written, _PIECE)
                if file_sha256(place) != entry.sha256:
                    raise ArtifactError(f"{name} in {path} was changed after it was packed", _HINT)
        Artifact.open(partial)
        partial.replace(out)
    except (zipfile.BadZipFile, EOFError) as error:
        raise ArtifactError(f"{path} is damaged: {_said(error)}", _HINT) from error
    except OSError as error:
        raise ArtifactError(f"cannot write {out}: {error.strerror or error}", "Free disk space or choose another place."
                            ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Artifact.open(out)


def check_bytes(path: Path, report: Report = silent) -> Manifest:
    """The manifest of a packed file whose every member has been hashed. ArtifactError names the one that differs."""
    try:
        with _opened(path) as archive:
            manifest = _checked(archive, path)
            for number, (name, entry) in enumerate(manifest.files.items()):
                report(Progress("check", number, len(manifest.files), "file", name))
                with archive.open(name) as source:
                    found = stream_sha256(source)
                if found != entry.sha256:
                    raise ArtifactError(f"{name} in {path} was changed after it was packed", _HINT)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise ArtifactError(f"{path} is damaged: {_said(error)}", _HINT) from error
    return manifest


def opened(path: Path, cache: Path, report: Report = silent) -> Artifact:
    """The artifact of a packed file, unpacked once below ``cache`` under its digest.

    Where that is there already, a file that was not seen before in this state (size, times, inode) is hashed all the
    same: its manifest alone would pass a damaged one for the sound one of the same digest.
    """
    manifest = read_manifest(path)
    place = cache / manifest.digest[:32]
    found = path.stat()
    state = f"{manifest.digest} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"
    seen = cache / ".seen" / hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    with alone(place, report):
        if not place.is_dir():
            unpack(path, place, report)
        elif not seen.is_file() or seen.read_text() != state:
            check_bytes(path, report)
        seen.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(seen, state.encode())
        return Artifact.open(place)
