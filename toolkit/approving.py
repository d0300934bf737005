"""Approve: a person lets one engine go, on one verdict, and says why. Publishing is another step, often by another.

An approval is an entry of the home's hash-chained log, so it says who, when and why, and cannot be changed unseen. It
holds for exactly this engine *and* this verdict: an engine that is judged again is approved again. It can be withdrawn,
which is an entry too; what was published meanwhile stays, and is moved back by a rollback.

Without a PASS an approval needs ``override``, and the release that comes of it stays marked. A refusal for a verdict
has that verdict's exit code (1 FAIL, 3 INCONCLUSIVE or ANOMALOUS), so that a script which only publishes can tell a
worse engine from one that was not judged (2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from evals.gate import EXIT_CODES
from toolkit.audit import AuditEntry
from toolkit.errors import NotPassedError, ReleaseError
from toolkit.store import RunStore, StoredVerdict

APPROVE, WITHDRAW = "approve", "withdraw"


@dataclass(frozen=True, slots=True)
class Approved:
    """One approval. ``verdict``: the verdict's digest, empty where there was none; ``word`` and ``policy`` are its."""

    engine: str
    verdict: str
    word: str
    policy: str
    who: str
    at: str
    reason: str
    override: bool


def passing_verdict(store: RunStore, engine_digest: str, policy_sha256: str | None) -> StoredVerdict:
    """The newest verdict on exactly this engine, which must be PASS.

    ReleaseError where there is none; NotPassedError says what it is instead.
    """
    found = store.verdict_of(engine_digest, policy_sha256)
    under = " under this policy" if policy_sha256 else ""
    if found is None:
        raise ReleaseError(f"engine {engine_digest[:12]} has no verdict{under}",
                           "Judge it first: toolkit gate ENGINE --baseline REF --policy FILE")
    if found.verdict.word != "PASS":
        raise NotPassedError(f"engine {engine_digest[:12]} has the verdict {found.verdict.word}{under}: "
                             f"{found.verdict.reason}", "Only an engine whose newest verdict is PASS is released; "
                             "--override with a --reason marks an exception for ever.",
                             EXIT_CODES[found.verdict.word])
    return found


def verdict_for(store: RunStore, engine: str, policy_sha256: str | None, override: bool) -> StoredVerdict | None:
    """The newest PASS, or with an override whatever is there. An override without need would be a false mark."""
    if not override:
        return passing_verdict(store, engine, policy_sha256)
    found = store.verdict_of(engine, policy_sha256)
    if found is not None and found.verdict.word == "PASS":
        raise ReleaseError("this engine has passed: there is nothing to override", "Leave --override out.")
    return found


def approve(store: RunStore, engine: str, who: str, reason: str, *, policy_sha256: str | None = None,
            override: bool = False) -> Approved:
    """Write the approval into the log. ReleaseError without a name, a reason, or a PASS (unless overridden)."""
    if not who.strip() or not reason.strip():
        raise ReleaseError("an approval needs a name and a reason", "Say who approves, and why: --reason TEXT.")
    verdict = verdict_for(store, engine, policy_sha256, override)
    detail = {"who": who.strip(), "reason": reason.strip(), "verdict": verdict.digest if verdict else "",
              "word": verdict.verdict.word if verdict else "NOT JUDGED",
              "policy": verdict.verdict.policy if verdict else "", "override": "yes" if override else ""}
    return _approved(store.log(APPROVE, engine, **detail))


def withdraw(store: RunStore, engine: str, who: str, reason: str) -> None:
    """Take the approval of an engine back. ReleaseError when it has none, or without a name or a reason."""
    if not who.strip() or not reason.strip():
        raise ReleaseError("a withdrawal needs a name and a reason", "Say who withdraws it, and why: --reason TEXT.")
    if engine not in standing(store.audit()):
        raise ReleaseError(f"engine {engine[:12]} is not approved", "There is nothing to withdraw.")
    store.log(WITHDRAW, engine, who=who.strip(), reason=reason.strip())


def standing(log: Sequence[AuditEntry], moment: datetime | None = None) -> dict[str, Approved]:
    """Engine -> the approval that held at that moment (None: now), oldest first."""
    found: dict[str, Approved] = {}
    for entry in log:
        if moment is not None and datetime.fromisoformat(entry.at) > moment:
            continue
        if entry.action in (APPROVE, WITHDRAW):
            found.pop(entry.subject, None)
        if entry.action == APPROVE:
            found[entry.subject] = _approved(entry)
    return found


def approval_of(store: RunStore, engine: str, policy_sha256: str | None = None) -> Approved:
    """The approval under which an engine may be published now; ReleaseError says what is missing."""
    found = standing(store.audit()).get(engine)
    how = f"toolkit releases approve {engine[:12]} --reason TEXT, or publish with --reason to do both"
    if found is None:
        passing_verdict(store, engine, policy_sha256)  # what could not be approved either is told so first
        raise ReleaseError(f"engine {engine[:12]} is not approved", f"Approve it: {how}.")
    verdict = verdict_for(store, engine, policy_sha256, found.override)
    if found.verdict != (verdict.digest if verdict else ""):
        raise ReleaseError(f"{found.who} approved engine {engine[:12]} on {found.at[:10]} on another verdict than its "
                           "newest", f"Approve it again: {how}.")
    return found


def _approved(entry: AuditEntry) -> Approved:
    detail = entry.detail
    return Approved(entry.subject, detail["verdict"], detail["word"], detail["policy"], detail["who"], entry.at,
                    detail["reason"], bool(detail["override"]))
