"""Release: an engine, its card and its evidence, copied to a target where anybody can check every byte.

    TARGET/blobs/sha256/<hex>   each file, each release's record, each manifest: named by what it holds
    TARGET/index.json           the releases, and which alias points at which: one small file, replaced last
    TARGET/audit.jsonl          hash-chained log: what was published, where aliases went, who, when, why

A release's digest is the sha256 of its OCI manifest, which names every file by sha256. A release is made only with a
PASS verdict for exactly this engine digest under the policy that was named; an override needs a reason and stays
marked in record, card, statement and log. The order is: copy blob by blob (one that is there is not copied again), read
every blob back, log, and last of all move the alias. A publish that is killed anywhere leaves the old alias pointing
at the old release, and goes on where it was when it is started again. Publishing copies, it never links.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from calib.artifact import Artifact, canonical_json, sha256_hex
from calib.json_text import parse_object
from calib.progress import Progress, Report, silent
from calib.scheme import Frozen
from evals.report import Row, Verdict
from toolkit import oci
from toolkit.audit import GENESIS, AuditEntry, broken_link, next_entry
from toolkit.errors import DamagedReleaseError, ReleaseError, unknown_alias
from toolkit.store import RunStore
from toolkit.target import Target

AUDIT_FILE = "audit.jsonl"
STATEMENT = "provenance.json"
_CHANGED = "Somebody changed it; take it from a copy."
_ALIAS = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Approval(Frozen):
    """Who let this release go, when and why. ``override``: there was no PASS, and this is why it went all the same."""

    who: str
    at: str
    reason: str
    override: str | None = None


class ReleaseRecord(Frozen):
    """What a release claims: this engine, judged so, with these figures, made from this data, let go by this person.

    ``created`` and ``publisher``: when it was published and by whom, which need not be when and who approved.
    """

    name: str
    engine_digest: str
    checkpoint_digest: str
    verdict_digest: str | None
    verdict: Verdict | None
    row: Row
    licences: dict[str, str]
    parts: list[str]
    approval: Approval
    created: str
    publisher: str

    @property
    def word(self) -> str:
        """The verdict as it is shown, with the mark of an override."""
        word = self.verdict.word if self.verdict else "NOT JUDGED"
        return f"{word} (override)" if self.approval.override else word

    @property
    def identity(self) -> tuple[str, str | None, str | None, tuple[str, ...]]:
        """Two releases with the same are the same release."""
        return self.engine_digest, self.verdict_digest, self.approval.override, tuple(self.parts)


@dataclass(frozen=True, slots=True)
class Release:
    """One release of a target and the aliases that name it now."""

    digest: str
    record: ReleaseRecord
    manifest: oci.Manifest
    created: str
    aliases: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(layer.size for layer in self.manifest.layers)

    def as_dict(self) -> dict[str, Any]:
        return {"digest": self.digest, "name": self.record.name, "engine_digest": self.record.engine_digest,
                "verdict": self.record.word, "approval": self.record.approval.model_dump(),
                "publisher": self.record.publisher, "created": self.created, "size_bytes": self.size_bytes,
                "files": len(self.manifest.layers), "aliases": list(self.aliases)}


@dataclass(frozen=True, slots=True)
class Bundle:
    """What is to be released: the record, artifacts by their folder in the release, and small texts by name.

    ``statement``: called with {path: sha256} of all files and the audit log's head, returns the files that say so.
    """

    record: ReleaseRecord
    artifacts: Mapping[str, Artifact]
    texts: Mapping[str, str]
    statement: Any = None


def check_alias(alias: str) -> None:
    if not _ALIAS.fullmatch(alias):
        raise ReleaseError(f"alias {alias!r} is not a name", "Use lower-case letters, digits, '.', '_' and '-'.")


def publish(store: RunStore, target: Target, bundle: Bundle, alias: str, report: Report = silent) -> Release:
    """Copy the bundle to the target, check the copy, and let ``alias`` name it.

    Publishing the same engine, verdict and parts again makes no second release: the one that is there is checked.
    """
    check_alias(alias)
    record = bundle.record
    with target.lock() as still_here:
        index, log = read_index(target), read_audit(target)
        known = next((found for found in list_releases(target) if found.record.identity == record.identity), None)
        if known is None:
            manifest = _copy(target, bundle, log[-1].hash if log else GENESIS, still_here, report)
            known = Release(sha256_hex(manifest.to_bytes()), record, manifest, record.created)
        check_copy(target, known, still_here, report)
        if not any(entry.action == "publish" and entry.subject == known.digest for entry in log):
            append_audit(target, log, "publish", known.digest, _published(record))
        index = index.listing(_entry(known))
        target.write(oci.INDEX_FILE, index.to_bytes())
        move_alias(target, index, log, alias, known, "alias", record.publisher, record.approval.reason)
    store.set_alias(target.name, alias, known.digest, record.engine_digest)
    store.log("publish", known.digest, alias=alias, engine=record.engine_digest, target=target.name,
              who=record.publisher, reason=record.approval.reason)
    names = tuple(sorted({*known.aliases, alias}))
    return Release(known.digest, known.record, known.manifest, known.created, names)


def _published(record: ReleaseRecord) -> dict[str, str]:
    detail = {"engine": record.engine_digest, "verdict": record.verdict_digest or "", "verdict_word": record.word,
              "policy": record.verdict.policy if record.verdict else "", "by": record.publisher,
              "approved": record.approval.at, **record.approval.model_dump(exclude={"at"}, exclude_none=True)}
    return {name: value for name, value in detail.items() if value}


def _copy(target: Target, bundle: Bundle, head: str, still_here: Any, report: Report) -> oci.Manifest:
    """Write every blob that is not there yet; returns the manifest, whose blob is written last."""
    files: list[tuple[str, Path]] = [
        (f"{folder}/{path.relative_to(artifact.path).as_posix()}", path) for folder, artifact in
        sorted(bundle.artifacts.items()) for path in sorted(artifact.path.rglob("*")) if path.is_file()]
    total = sum(path.stat().st_size for _, path in files) / 1e6
    layers, done = [], 0.0
    for name, path in files:
        report(Progress("copy", round(done, 1), round(total, 1), "MB", name))
        layers.append(_put_file(target, name, path))
        still_here()
        done += layers[-1].size / 1e6
    report(Progress("copy", round(total, 1), round(total, 1), "MB"))
    texts = dict(bundle.texts)
    layers += [_put_bytes(target, text.encode(), oci.FILE_TYPE, title=name) for name, text in sorted(texts.items())]
    if bundle.statement is not None:
        said = bundle.statement({layer.annotations[oci.TITLE]: layer.hex for layer in layers}, head)
        layers += [_put_bytes(target, content, oci.FILE_TYPE, title=name) for name, content in sorted(said.items())]
    config = _put_bytes(target, canonical_json(bundle.record.model_dump(mode="json")), oci.CONFIG_TYPE)
    manifest = oci.Manifest(config=config, layers=layers, annotations={oci.CREATED: bundle.record.created})
    _put_bytes(target, manifest.to_bytes(), oci.MANIFEST_TYPE)
    return manifest


def _put_file(target: Target, name: str, path: Path) -> oci.Descriptor:
    with path.open("rb") as file:
        hexed = file_digest(file, "sha256").hexdigest()
    size = path.stat().st_size
    found = oci.Descriptor(mediaType=oci.FILE_TYPE, digest=f"sha256:{hexed}", size=size,
                           annotations={oci.TITLE: name})
    if target.size(found.blob) != size:
        target.put(path, found.blob)
    return found


def _put_bytes(target: Target, data: bytes, media_type: str, **annotations: str) -> oci.Descriptor:
    found = oci.descriptor(data, media_type, **annotations)
    if target.size(found.blob) != found.size:
        target.write(found.blob, data)
    return found


def check_copy(target: Target, release: Release, still_here: Any, report: Report) -> None:
    """Every blob is read back and hashed before anything points at the release."""
    blobs = {entry.hex: entry for entry in (*release.manifest.layers, release.manifest.config)}
    for number, entry in enumerate(blobs.values()):
        report(Progress("check", number, len(blobs), "file", entry.annotations.get(oci.TITLE, "record")))
        if target.size(entry.blob) != entry.size or target.sha256(entry.blob) != entry.hex:
            raise DamagedReleaseError(f"{entry.annotations.get(oci.TITLE, 'record')} in {target.name} differs from "
                                      "what was written", f"Check the disk, remove {entry.blob} and publish again.")
        still_here()
    report(Progress("check", len(blobs), len(blobs), "file"))


# the target's own records


def read_index(target: Target) -> oci.Index:
    """DamagedReleaseError when it is no index."""
    content = target.read(oci.INDEX_FILE)
    try:
        return oci.Index() if content is None else oci.Index.model_validate(parse_object(
            content, f"{oci.INDEX_FILE} in {target.name}", DamagedReleaseError, _CHANGED))
    except ValidationError as error:
        raise DamagedReleaseError(f"{oci.INDEX_FILE} in {target.name} is no OCI index", _CHANGED) from error


def read_audit(target: Target) -> list[AuditEntry]:
    """The log, oldest first; DamagedReleaseError names the line that breaks it."""
    entries = []
    for number, line in enumerate((target.read(AUDIT_FILE) or b"").splitlines(), 1):
        try:
            entries.append(AuditEntry.model_validate(parse_object(line, f"{AUDIT_FILE} line {number} in {target.name}",
                                                                  DamagedReleaseError, "Somebody changed the log.")))
        except ValidationError as error:
            raise DamagedReleaseError(f"{AUDIT_FILE} line {number} in {target.name} is no log entry",
                                      "Somebody changed the log.") from error
    if (at := broken_link(entries)) is not None:
        raise DamagedReleaseError(f"{AUDIT_FILE} in {target.name} is broken at entry {at}", "Somebody changed the log.")
    return entries


def append_audit(target: Target, log: list[AuditEntry], action: str, subject: str, detail: dict[str, str]) -> None:
    log.append(next_entry(log[-1] if log else None, action, subject, detail))
    target.write(AUDIT_FILE, b"".join(entry.model_dump_json().encode() + b"\n" for entry in log))


def move_alias(target: Target, index: oci.Index, log: list[AuditEntry], alias: str, release: Release, action: str,
               who: str, reason: str) -> None:
    """Log, then replace the index: the last thing that happens. Call it with the target's lock held."""
    before = index.aliases().get(alias, "")
    detail = {"digest": release.digest, "from": before, "who": who, "reason": reason}
    append_audit(target, log, action, alias, {name: value for name, value in detail.items() if value})
    if target.read(oci.LAYOUT_FILE) is None:
        target.write(oci.LAYOUT_FILE, oci.LAYOUT)
    target.write(oci.INDEX_FILE, index.pointing(alias, _entry(release)).to_bytes())


def _entry(release: Release) -> oci.Descriptor:
    found = oci.descriptor(release.manifest.to_bytes(), oci.MANIFEST_TYPE, created=release.created)
    return found.model_copy(update={"artifact_type": oci.ARTIFACT_TYPE})


def open_release(target: Target, entry: oci.Descriptor, aliases: Sequence[str] = ()) -> Release:
    """DamagedReleaseError when manifest or record are missing or are not what their names say."""
    manifest = _parsed(target, entry, oci.Manifest)
    record = _parsed(target, manifest.config, ReleaseRecord)
    return Release(entry.hex, record, manifest, entry.annotations.get(oci.CREATED, ""), tuple(sorted(aliases)))


def _parsed(target: Target, entry: oci.Descriptor, kind: Any) -> Any:
    content = target.read(entry.blob)
    if content is None or sha256_hex(content) != entry.hex:
        raise DamagedReleaseError(f"{entry.blob} in {target.name} is {'missing' if content is None else 'changed'}",
                                  "Run `toolkit releases verify`.")
    try:
        return kind.model_validate(parse_object(content, f"{entry.blob} in {target.name}", DamagedReleaseError,
                                                "Run `toolkit releases verify`."))
    except ValidationError as error:
        raise DamagedReleaseError(f"{entry.blob} in {target.name} is no {kind.__name__}",
                                  "It was written by another version of the toolkit.") from error


def list_releases(target: Target) -> list[Release]:
    """All releases of a target, newest first, each with the aliases that name it now."""
    index = read_index(target)
    names: dict[str, list[str]] = {}
    for alias, digest in index.aliases().items():
        names.setdefault(digest, []).append(alias)
    found = [open_release(target, entry, names.get(digest, ())) for digest, entry in index.releases().items()]
    return sorted(found, key=lambda release: release.created, reverse=True)


def release_of_alias(target: Target, alias: str) -> Release:
    """UnknownNameError with the near match when no alias is called so."""
    index = read_index(target)
    aliases = index.aliases()
    if alias not in aliases:
        raise unknown_alias(alias, aliases)
    return open_release(target, index.releases()[aliases[alias]], [alias])
