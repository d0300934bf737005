"""A log that shows when somebody changed it: a hash chain.

Each entry holds the hash of the one before it, and its own hash over everything else in it:

    hash_i = sha256(canonical_json({seq, at, action, subject, detail, previous: hash_(i-1)}))

Changing, dropping or reordering an entry breaks every later link. (Cutting off the end does not; whoever needs to know
that keeps the last hash elsewhere: ``releases verify`` prints it.) The same chain serves the store's audit table and
the ``audit.jsonl`` that travels with a release folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime

from calib.artifact import canonical_json
from calib.scheme import Frozen

GENESIS = "0" * 64


class AuditEntry(Frozen):
    """One thing that happened: ``action`` (published, alias moved, ...) to ``subject`` (a digest or a name)."""

    seq: int
    at: str
    action: str
    subject: str
    detail: dict[str, str]
    previous: str
    hash: str


def _hash(seq: int, at: str, action: str, subject: str, detail: dict[str, str], previous: str) -> str:
    return hashlib.sha256(canonical_json({"seq": seq, "at": at, "action": action, "subject": subject,
                                          "detail": detail, "previous": previous})).hexdigest()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def next_entry(last: AuditEntry | None, action: str, subject: str, detail: dict[str, str]) -> AuditEntry:
    """The entry that follows ``last`` (None: the first of a log)."""
    seq, previous, at = (last.seq + 1, last.hash, now()) if last else (1, GENESIS, now())
    return AuditEntry(seq=seq, at=at, action=action, subject=subject, detail=detail, previous=previous,
                      hash=_hash(seq, at, action, subject, detail, previous))


def broken_link(entries: Iterable[AuditEntry]) -> int | None:
    """The sequence number at which the chain breaks, or None when it holds."""
    previous, expected = GENESIS, 1
    for entry in entries:
        content = _hash(entry.seq, entry.at, entry.action, entry.subject, entry.detail, entry.previous)
        if entry.seq != expected or entry.previous != previous or entry.hash != content:
            return expected
        previous, expected = entry.hash, expected + 1
    return None
