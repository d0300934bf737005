"""What is known of artifacts: where they lie, what they were made from, how they were judged, where they were released.

``resolve`` turns an unambiguous digest prefix (6 characters or more) into an artifact; the folder it names is opened
strictly by whoever uses it, so a stale path is an error there and never a wrong result.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from calib.artifact import Artifact
from evals.report import Verdict
from toolkit.audit import AuditEntry, broken_link, next_entry, now
from toolkit.database import Database
from toolkit.errors import UsageError

SHORTEST_PREFIX = 6


@dataclass(frozen=True, slots=True)
class StoredVerdict:
    digest: str
    verdict: Verdict
    path: Path
    at: str


@dataclass(frozen=True, slots=True)
class Alias:
    """``target``: the folder or URL in which the alias lies."""

    target: str
    alias: str
    digest: str
    engine_digest: str
    at: str


class Ledger(Database):
    """Artifacts, verdicts, aliases and the audit log."""

    def remember(self, artifact: Artifact) -> None:
        """Make an artifact findable by its digest; the newest place wins."""
        with self._write() as db:
            db.execute("INSERT INTO artifacts VALUES(?,?,?,?) ON CONFLICT(digest) DO UPDATE SET path=excluded.path, "
                       "seen=excluded.seen", (artifact.digest, artifact.kind, str(artifact.path.absolute()), now()))
            db.executemany("INSERT OR IGNORE INTO parents VALUES(?,?)",
                           [(parent, artifact.digest) for parent in artifact.parents])

    def resolve(self, prefix: str) -> tuple[str, Path] | None:
        """(kind, path) of the one artifact whose digest begins so; None if there is none, UsageError if several."""
        if len(prefix) < SHORTEST_PREFIX or set(prefix) - set("0123456789abcdef"):
            return None
        found = self._db.execute("SELECT digest, kind, path FROM artifacts WHERE digest >= ? AND digest < ? LIMIT 4",
                                 (prefix, prefix + "g")).fetchall()
        if len(found) > 1:
            names = ", ".join(f"{row['digest'][:len(prefix) + 4]} ({row['kind']})" for row in found)
            raise UsageError(f"digest prefix {prefix!r} is ambiguous: {names}", "Give more characters.")
        return (found[0]["kind"], Path(found[0]["path"])) if found else None

    def artifacts(self, kind: str, limit: int = 50) -> list[Path]:
        """Where the newest artifacts of a kind lie."""
        found = self._db.execute("SELECT path FROM artifacts WHERE kind=? ORDER BY seen DESC LIMIT ?", (kind, limit))
        return [Path(row["path"]) for row in found.fetchall()]

    def children(self, parent: str, kind: str) -> list[Path]:
        """Where the artifacts of a kind lie that were made from ``parent``, the newest first."""
        found = self._db.execute("SELECT path FROM parents JOIN artifacts ON digest=child WHERE parent=? AND kind=? "
                                 "ORDER BY seen DESC", (parent, kind)).fetchall()
        return [Path(row["path"]) for row in found]

    # verdicts

    def add_verdict(self, artifact: Artifact, verdict: Verdict) -> None:
        self.remember(artifact)
        with self._write() as db:
            db.execute("INSERT OR REPLACE INTO verdicts VALUES(?,?,?,?,?,?,?,?)",
                       (artifact.digest, verdict.candidate_digest, verdict.policy, verdict.policy_sha256,
                        verdict.word, verdict.model_dump_json(), str(artifact.path), now()))

    def verdict_of(self, engine_digest: str, policy_sha256: str | None = None) -> StoredVerdict | None:
        """The newest verdict on exactly this engine (under this policy, when one is named)."""
        found = self._db.execute("SELECT * FROM verdicts WHERE engine_digest=? AND (? IS NULL OR policy_sha256=?) "
                                 "ORDER BY at DESC, rowid DESC LIMIT 1",
                                 (engine_digest, policy_sha256, policy_sha256)).fetchone()
        if not found:
            return None
        return StoredVerdict(found["digest"], Verdict.model_validate_json(found["verdict"]), Path(found["path"]),
                             found["at"])

    # releases and audit

    def set_alias(self, target: str, alias: str, digest: str, engine_digest: str) -> None:
        with self._write() as db:
            db.execute("INSERT OR REPLACE INTO releases VALUES(?,?,?,?,?)",
                       (target, alias, digest, engine_digest, now()))

    def aliases(self, alias: str | None = None) -> list[Alias]:
        """Known aliases, newest first."""
        found = self._db.execute("SELECT * FROM releases WHERE ? IS NULL OR alias=? ORDER BY at DESC, rowid DESC",
                                 (alias, alias)).fetchall()
        return [Alias(row["target"], row["alias"], row["digest"], row["engine_digest"], row["at"])
                for row in found]

    def log(self, action: str, subject: str, **detail: str) -> AuditEntry:
        with self._write() as db:
            last = db.execute("SELECT entry FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
            entry = next_entry(AuditEntry.model_validate_json(last["entry"]) if last else None, action, subject, detail)
            db.execute("INSERT INTO audit VALUES(?,?)", (entry.seq, entry.model_dump_json()))
        return entry

    def audit(self) -> list[AuditEntry]:
        """All entries, oldest first; UsageError names the first broken link."""
        entries = [AuditEntry.model_validate_json(row["entry"])
                   for row in self._db.execute("SELECT entry FROM audit ORDER BY seq")]
        if (at := broken_link(entries)) is not None:
            raise UsageError(f"the audit log of {self.path} is broken at entry {at}", "Somebody changed the store.")
        return entries
