"""From a release back to a folder: what ``serve alias:NAME`` opens, and what ``releases pull`` writes.

Each file is hashed while it is copied; the folder appears under its name only when all of them were right. A folder
that is named after the release's digest and is there is that release, so serving it again copies nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path, PurePosixPath

from calib.progress import Progress, Report, silent
from toolkit.errors import DamagedReleaseError
from toolkit.release import Release, release_of_alias
from toolkit.target import Target, open_target


def unpack(target: Target, release: Release, folder: Path, report: Report = silent) -> Path:
    """Write the release's files below ``folder`` (which must not exist), checked against their digests."""
    if folder.exists():
        raise DamagedReleaseError(f"{folder} is there already", "Give a folder that does not exist.")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    files = release.manifest.files()
    try:
        for number, (name, layer) in enumerate(files.items()):
            report(Progress("unpack", number, len(files), "file", name))
            place = partial / _inside(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            found = hashlib.sha256()
            with place.open("wb") as written:
                for chunk in target.chunks(layer.blob):
                    found.update(chunk)
                    written.write(chunk)
            if found.hexdigest() != layer.hex:
                raise DamagedReleaseError(f"{name} of release {release.digest[:12]} was changed after release",
                                          "Run `toolkit releases verify`, and publish again.")
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    report(Progress("unpack", len(files), len(files), "file"))
    return folder


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name:
        raise DamagedReleaseError(f"file name {name!r} leaves its release", "Do not use this release.")
    return path


def engine_of_alias(target_name: str | Path, alias: str, cache: Path, report: Report = silent) -> Path:
    """The engine folder of the release that an alias names now, unpacked once below ``cache``."""
    target = open_target(target_name)
    release = release_of_alias(target, alias)
    folder = cache / release.digest[:32]
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        unpack(target, release, folder, report)
    if not (folder / "engine").is_dir():
        raise DamagedReleaseError(f"release {release.digest[:12]} holds no engine",
                                  "It was published with its checkpoint only: toolkit releases pull, toolkit build.")
    return folder / "engine"
