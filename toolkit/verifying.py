"""``releases verify``: every blob hashed again, every digest followed, the log's chain walked, aliases compared.

What it proves: from index to manifest to file nothing differs from what was released, and the log was not rewritten in
the middle. What it cannot prove alone: that the log's end was not cut off. The head that it prints does, when it is
kept elsewhere; each release's signed statement holds the head of the log before it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from calib.progress import Progress, Report, silent
from toolkit import oci
from toolkit.audit import GENESIS, AuditEntry
from toolkit.errors import DamagedReleaseError, ReleaseError
from toolkit.history import moves
from toolkit.release import STATEMENT, Release, open_release, read_audit, read_index
from toolkit.target import Target


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found; ``faults`` empty means that all is as it was released. ``notes`` are no faults."""

    releases: int
    files: int
    bytes: int
    audit_head: str
    faults: list[str]
    notes: list[str]


def verify_releases(target: Target, report: Report = silent) -> Outcome:
    """ReleaseError when there is no release target at all; everything else is a named fault."""
    if target.read(oci.INDEX_FILE) is None and target.read("audit.jsonl") is None:
        raise ReleaseError(f"{target.name} holds no releases", "Give the target that `toolkit publish --to` wrote.")
    faults: list[str] = []
    releases = _releases(target, faults)
    blobs = _blobs(releases)
    for number, (hexed, where) in enumerate(blobs.items()):
        report(Progress("verify", number, len(blobs), "file", where))
        _verify_blob(target, hexed, where, faults)
    report(Progress("verify", len(blobs), len(blobs), "file"))
    log = _log(target, faults)
    _verify_log(target, {release.digest for release in releases}, log, faults)
    for release in releases:
        faults += _statement_faults(target, release, log)
    layers = {layer.hex: layer.size for release in releases for layer in release.manifest.layers}
    loose = len(set(target.names(oci.BLOBS)) - set(blobs))
    notes = [f"{loose} blobs belong to no release: an interrupted publish left them, the next one uses them"] * bool(
        loose)
    return Outcome(len(releases), len(layers), sum(layers.values()), log[-1].hash if log else GENESIS, faults, notes)


def _releases(target: Target, faults: list[str]) -> list[Release]:
    found = []
    try:
        for entry in read_index(target).releases().values():
            try:
                found.append(open_release(target, entry))
            except DamagedReleaseError as error:
                faults.append(error.message)
    except DamagedReleaseError as error:
        faults.append(error.message)
    return found


def _blobs(releases: list[Release]) -> dict[str, str]:
    """Hex -> what it is, for people."""
    found: dict[str, str] = {}
    for release in releases:
        short = release.digest[:12]
        found |= {layer.hex: f"{layer.annotations[oci.TITLE]} of release {short}" for layer in release.manifest.layers}
        found |= {release.manifest.config.hex: f"the record of release {short}", release.digest: f"release {short}"}
    return found


def _verify_blob(target: Target, hexed: str, where: str, faults: list[str]) -> None:
    name = f"{oci.BLOBS}/{hexed}"
    if target.size(name) is None:
        faults.append(f"{where} is missing")
    elif target.sha256(name) != hexed:
        faults.append(f"{where} was changed after release")


def _log(target: Target, faults: list[str]) -> list[AuditEntry]:
    try:
        return read_audit(target)
    except DamagedReleaseError as error:
        faults.append(error.message)
        return []


def _verify_log(target: Target, digests: set[str], log: list[AuditEntry], faults: list[str]) -> None:
    published = {entry.subject for entry in log if entry.action == "publish"}
    faults += [f"the log names release {digest[:12]}, which is not there" for digest in sorted(published - digests)
               if _was_reached(log, digest)]
    faults += [f"release {digest[:12]} is not in the log" for digest in sorted(digests - published)]
    last = {move.alias: move.digest for move in moves(log)}
    try:
        aliases = read_index(target).aliases()
    except DamagedReleaseError:
        return  # named already
    for name in sorted(set(last) | set(aliases)):
        if aliases.get(name) != last.get(name):
            faults.append(f"alias {name} names {(aliases.get(name) or 'nothing')[:12]}, its log says "
                          f"{(last.get(name) or 'nothing')[:12]}: a publish was interrupted, or the alias was changed")


def _was_reached(log: list[AuditEntry], digest: str) -> bool:
    """Whether an alias ever pointed at it: a publish that was killed before that has left no release behind."""
    return any(move.digest == digest for move in moves(log))


def _statement_faults(target: Target, release: Release, log: list[AuditEntry]) -> list[str]:
    """The statement must name exactly the release's files, and a log head that this log really had."""
    files = release.manifest.files()
    if STATEMENT not in files:
        return []
    content = target.read(files[STATEMENT].blob)
    if content is None:
        return []  # named already as missing
    try:
        said = json.loads(content)
        subjects = {subject["name"]: subject["digest"]["sha256"] for subject in said["subject"]}
        head = said["predicate"]["runDetails"]["metadata"]["auditHead"]
    except (ValueError, KeyError, TypeError):
        return [f"{STATEMENT} of release {release.digest[:12]} is no provenance statement"]
    held = {name: layer.hex for name, layer in files.items() if not name.startswith("provenance.")}
    faults = [] if subjects == held else [f"{STATEMENT} of release {release.digest[:12]} names other files"]
    if head != GENESIS and head not in {entry.hash for entry in log}:
        faults.append(f"the log has lost the entry that {STATEMENT} of release {release.digest[:12]} was made after")
    return faults
