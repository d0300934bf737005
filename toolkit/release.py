"""Release: an engine, its card and its evidence, copied into a folder that anybody can check.

    TARGET/releases/<engine 12>-<verdict 12>/     an artifact of kind ``release``
        README.md                                 the model card, with the measured table
        engine/                                   the engine, byte for byte
        evidence/{verdict,eval-report,latency-sweep}/
    TARGET/aliases/<name>.json                    {"digest", "folder"}: one small file, replaced atomically
    TARGET/audit.jsonl                            hash-chained log of what was published and where aliases went

A release is made only with a PASS verdict for exactly this engine digest, and the newest verdict counts. The order is:
copy, hash, re-read the copy, log, and last of all move the alias; a publish that is killed anywhere leaves the old
alias pointing at the old release. Publishing copies, it never links.
"""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from calib.artifact import Artifact, ArtifactWriter, write_atomic
from calib.errors import ArtifactError, UnknownNameError
from calib.progress import Progress, Report, silent
from calib.scheme import Frozen
from evals.report import Row, Verdict
from toolkit.audit import GENESIS, AuditEntry, broken_link, next_entry
from toolkit.errors import DamagedReleaseError, ReleaseError
from toolkit.store import RunStore, StoredVerdict

KIND, FORMAT = "release", 1
_ALIAS = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class ReleaseRecord(Frozen):
    """What a release claims: this engine, judged so, with these figures, made from this data."""

    name: str
    engine_digest: str
    verdict_digest: str
    verdict: Verdict
    row: Row
    licences: dict[str, str]


class AliasRecord(Frozen):
    digest: str
    folder: str


@dataclass(frozen=True, slots=True)
class Release:
    """An opened release and the aliases that name it."""

    digest: str
    path: Path
    engine_digest: str
    name: str
    verdict: str
    created: str
    aliases: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path), "aliases": list(self.aliases)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What ``verify_releases`` found; ``faults`` empty means that all is as it was released."""

    releases: int
    files: int
    bytes: int
    audit_head: str
    faults: list[str]


def passing_verdict(store: RunStore, engine_digest: str, policy_sha256: str | None) -> StoredVerdict:
    """The newest verdict on exactly this engine, which must be PASS; ReleaseError says what it is instead."""
    found = store.verdict_of(engine_digest, policy_sha256)
    under = " under this policy" if policy_sha256 else ""
    if found is None:
        raise ReleaseError(f"engine {engine_digest[:12]} has no verdict{under}",
                           "Judge it first: toolkit gate ENGINE --baseline REF --policy FILE")
    if found.verdict.word != "PASS":
        raise ReleaseError(f"engine {engine_digest[:12]} has the verdict {found.verdict.word}{under}: "
                           f"{found.verdict.reason}", "Only an engine whose newest verdict is PASS is released.")
    return found


def publish(store: RunStore, engine_path: Path, target: Path, alias: str, *, evidence: dict[str, Artifact],
            row: Row, card: str, name: str, licences: dict[str, str], policy_sha256: str | None = None,
            report: Report = silent) -> Release:
    """Release the engine at ``engine_path`` into the folder ``target`` and let ``alias`` name it.

    ``evidence`` maps names to artifacts that are copied along. Publishing the same engine and verdict again makes no
    second copy: it checks the one that is there and moves the alias.
    """
    if not _ALIAS.fullmatch(alias):
        raise ReleaseError(f"alias {alias!r} is not a name", "Use lower-case letters, digits, '.', '_' and '-'.")
    engine = Artifact.open(engine_path, "engine")
    verdict = passing_verdict(store, engine.digest, policy_sha256)
    record = ReleaseRecord(name=name, engine_digest=engine.digest, verdict_digest=verdict.digest,
                           verdict=verdict.verdict, row=row, licences=licences)
    place = target.absolute() / "releases" / f"{engine.digest[:12]}-{verdict.digest[:12]}"
    target.mkdir(parents=True, exist_ok=True)
    with _lock(target):
        artifact = _existing(place) or _write(place, record, engine, evidence | {
            "verdict": Artifact.open(verdict.path, "verdict")}, card, report)
        _check_copy(artifact, engine, report)
        log = read_audit(target)
        if not any(entry.action == "publish" and entry.subject == artifact.digest for entry in log):
            _append(target, log, "publish", artifact.digest, {"engine": engine.digest, "verdict": verdict.digest,
                                                              "policy": verdict.verdict.policy})
        _append(target, log, "alias", alias, {"digest": artifact.digest})
        aliases = target / "aliases"
        aliases.mkdir(exist_ok=True)
        write_atomic(aliases / f"{alias}.json", AliasRecord(
            digest=artifact.digest, folder=place.name).model_dump_json().encode())
    store.remember(artifact)
    store.set_alias(target, alias, artifact.digest, engine.digest)
    store.log("publish", artifact.digest, alias=alias, engine=engine.digest, target=str(target.absolute()))
    return _release(artifact, (alias,))


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    with (target / ".lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ReleaseError(f"another process is publishing to {target}", "Wait for it.") from error
        yield


def _existing(place: Path) -> Artifact | None:
    return Artifact.open(place, KIND, FORMAT) if place.exists() else None


def _write(place: Path, record: ReleaseRecord, engine: Artifact, evidence: dict[str, Artifact], card: str,
           report: Report) -> Artifact:
    copies = [("engine", engine), *((f"evidence/{name}", artifact) for name, artifact in sorted(evidence.items()))]
    total = sum(artifact.size_bytes for _, artifact in copies) / 1e6
    done = 0.0
    with ArtifactWriter(place, KIND, FORMAT, [engine.digest, *(evidence[name].digest for name in sorted(evidence))]
                        ) as writer:
        writer.record = record.model_dump(mode="json")
        (writer.folder / "README.md").write_text(card, encoding="utf-8")
        for name, artifact in copies:
            report(Progress("copy", round(done, 1), round(total, 1), "MB", name))
            shutil.copytree(artifact.path, writer.folder / name, symlinks=True)
            done += artifact.size_bytes / 1e6
        report(Progress("copy", round(total, 1), round(total, 1), "MB"))
    assert writer.artifact is not None
    return writer.artifact


def _check_copy(artifact: Artifact, engine: Artifact, report: Report) -> None:
    """The copy is read back and hashed before anything points at it."""
    report(Progress("check", 0, 1, "release"))
    copied = Artifact.open(artifact.path / "engine", "engine")
    changed = [*artifact.verify(), *copied.verify()]
    if changed or copied.digest != engine.digest:
        raise DamagedReleaseError(f"{artifact.path}: {changed[0] if changed else 'engine'} differs from what was "
                                  "written", "Check the disk, remove the folder and publish again.")
    report(Progress("check", 1, 1, "release"))


# the folder's own records


def read_audit(target: Path) -> list[AuditEntry]:
    """The log, oldest first; DamagedReleaseError names the line that breaks it."""
    path = target / "audit.jsonl"
    lines = path.read_bytes().splitlines() if path.is_file() else []
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(AuditEntry.model_validate_json(line))
        except ValidationError as error:
            raise DamagedReleaseError(f"{path} line {number} is no log entry", "Somebody changed the log.") from error
    if (at := broken_link(entries)) is not None:
        raise DamagedReleaseError(f"{path} is broken at entry {at}", "Somebody changed the log.")
    return entries


def _append(target: Path, log: list[AuditEntry], action: str, subject: str, detail: dict[str, str]) -> None:
    log.append(next_entry(log[-1] if log else None, action, subject, detail))
    write_atomic(target / "audit.jsonl", b"".join(entry.model_dump_json().encode() + b"\n" for entry in log))


def read_aliases(target: Path) -> dict[str, AliasRecord]:
    found = {}
    for path in sorted((target / "aliases").glob("*.json")):
        try:
            found[path.stem] = AliasRecord.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise DamagedReleaseError(f"{path} is no alias", "Somebody changed it; publish again.") from error
    return found


def engine_of_alias(target: Path, alias: str) -> Path:
    """The engine folder that an alias names."""
    aliases = read_aliases(target)
    if alias not in aliases:
        raise UnknownNameError("alias", alias, aliases)
    record = aliases[alias]
    release = Artifact.open(target / "releases" / Path(record.folder).name, KIND, FORMAT)
    if release.digest != record.digest:
        raise DamagedReleaseError(f"alias {alias} names {record.digest[:12]}, its folder holds {release.digest[:12]}",
                                  "Run `toolkit releases verify`.")
    return release.path / "engine"


def _release(artifact: Artifact, aliases: tuple[str, ...]) -> Release:
    record = ReleaseRecord.model_validate(artifact.record)
    return Release(artifact.digest, artifact.path, record.engine_digest, record.name, record.verdict.word,
                   artifact.manifest.created, aliases)


def _folders(target: Path) -> list[Path]:
    if not target.is_dir():
        raise ReleaseError(f"there is no folder {target}", "Give the folder that `toolkit publish --to` wrote.")
    return sorted(path for path in (target / "releases").glob("*") if path.is_dir() and not path.name.startswith("."))


def list_releases(target: Path) -> list[Release]:
    """All releases of a folder, newest first, each with the aliases that name it now."""
    aliases = read_aliases(target)
    found = []
    for path in _folders(target):
        artifact = Artifact.open(path, KIND, FORMAT)
        names = tuple(name for name, record in aliases.items() if record.digest == artifact.digest)
        found.append(_release(artifact, names))
    return sorted(found, key=lambda release: release.created, reverse=True)


def verify_releases(target: Path, report: Report = silent) -> Outcome:
    """Re-hash every file of every release and engine, follow the log, compare the aliases with it."""
    folders = _folders(target)
    faults: list[str] = []
    files = size = 0
    digests = set()
    for number, path in enumerate(folders):
        report(Progress("verify", number, len(folders), "release", path.name))
        try:
            artifact = Artifact.open(path, KIND, FORMAT)
            faults += [f"{path / name} was changed after release" for name in artifact.verify()]
            engine = Artifact.open(path / "engine", "engine")
            if engine.digest != ReleaseRecord.model_validate(artifact.record).engine_digest:
                faults.append(f"{path} holds engine {engine.digest[:12]}, not the one it was judged for")
        except ArtifactError as error:
            faults.append(error.message)
            continue
        digests.add(artifact.digest)
        files, size = files + len(artifact.manifest.files), size + artifact.size_bytes
    report(Progress("verify", len(folders), len(folders), "release"))
    head = _verify_log(target, digests, faults)
    return Outcome(len(folders), files, size, head, faults)


def _verify_log(target: Path, digests: set[str], faults: list[str]) -> str:
    try:
        log = read_audit(target)
        aliases = read_aliases(target)
    except DamagedReleaseError as error:
        faults.append(error.message)
        return GENESIS
    faults += [f"the log names release {entry.subject[:12]}, which is not there"
               for entry in log if entry.action == "publish" and entry.subject not in digests]
    logged = {entry.subject for entry in log if entry.action == "publish"}
    faults += [f"release {digest[:12]} is not in the log" for digest in sorted(digests - logged)]
    last = {entry.subject: entry.detail["digest"] for entry in log if entry.action == "alias"}
    for name in sorted(set(last) | set(aliases)):
        points = aliases[name].digest if name in aliases else None
        if points != last.get(name):
            faults.append(f"alias {name} names {(points or 'nothing')[:12]}, its log says "
                          f"{last.get(name, 'nothing')[:12]}: a publish was interrupted, or the alias was changed")
    return log[-1].hash if log else GENESIS
