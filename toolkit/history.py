"""Where an alias pointed, when, and who moved it: read from the hash-chained log, so it cannot be told otherwise.

A rollback is a move like any other, to a release that is still there: nothing is deleted, and the log says who, when
and why.
"""

from __future__ import annotations

import getpass
from dataclasses import dataclass
from datetime import UTC, datetime

from calib.errors import UnknownNameError
from calib.progress import Report, silent
from toolkit.audit import AuditEntry
from toolkit.errors import ReleaseError, UsageError, unknown_alias
from toolkit.release import Release, check_copy, list_releases, move_alias, read_audit, read_index
from toolkit.store import RunStore
from toolkit.target import Target

MOVES = ("alias", "rollback")


def who_am_i() -> str:
    """The person that logs and approvals name: the user that this process runs as."""
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:
        raise ReleaseError(f"this process has no user name: {error}", "Set LOGNAME to yours.") from error


@dataclass(frozen=True, slots=True)
class Move:
    """One move of an alias: ``before`` is empty for its first."""

    at: str
    alias: str
    action: str
    digest: str
    before: str
    who: str
    reason: str


def moves(log: list[AuditEntry], alias: str | None = None) -> list[Move]:
    """Every move, oldest first."""
    return [Move(entry.at, entry.subject, entry.action, entry.detail["digest"], entry.detail.get("from", ""),
                 entry.detail.get("who", ""), entry.detail.get("reason", ""))
            for entry in log if entry.action in MOVES and alias in (None, entry.subject)]


def parse_moment(text: str) -> datetime:
    """``2026-11-29`` (its end, UTC) or an ISO time (UTC when it names no zone); UsageError otherwise."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is no date or time", "Write it like 2026-11-29 or 2026-11-29T14:30.") from error
    if len(text) == 10:
        found = found.replace(hour=23, minute=59, second=59, microsecond=999_999)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def as_of(log: list[AuditEntry], moment: datetime) -> dict[str, Move]:
    """Alias -> the move that held at that moment."""
    return {move.alias: move for move in moves(log) if datetime.fromisoformat(move.at) <= moment}


def roll_back(store: RunStore, target: Target, alias: str, who: str, reason: str, to: str | None = None,
              report: Report = silent) -> Release:
    """Move ``alias`` to the release it named before, or to ``to`` (a digest or its prefix); checked before it moves."""
    if not reason.strip():
        raise ReleaseError("a rollback needs a reason", "Say why: --reason TEXT.")
    with target.lock() as still_here:
        index, log = read_index(target), read_audit(target)
        now = index.aliases().get(alias)
        if now is None:
            raise unknown_alias(alias, index.aliases())
        wanted = _wanted(list_releases(target), to) if to else _previous(list_releases(target), log, alias, now)
        if wanted.digest == now:
            raise ReleaseError(f"alias {alias} already names release {now[:12]}", "Name another with --release.")
        check_copy(target, wanted, still_here, report)
        move_alias(target, index, log, alias, wanted, "rollback", who, reason)
    store.set_alias(target.name, alias, wanted.digest, wanted.record.engine_digest)
    store.log("rollback", alias, digest=wanted.digest, before=now, target=target.name, who=who, reason=reason)
    return wanted


def _wanted(releases: list[Release], prefix: str) -> Release:
    found = [release for release in releases if release.digest.startswith(prefix)]
    if not found:
        raise UnknownNameError("release", prefix, [release.digest[:12] for release in releases],
                               "" if releases else "This target holds none: `toolkit publish` makes one.")
    if len(found) > 1:
        raise UsageError(f"release {prefix!r} is ambiguous", "Give more characters.")
    return found[0]


def _previous(releases: list[Release], log: list[AuditEntry], alias: str, now: str) -> Release:
    """The last release that the alias named and that is not the present one."""
    there = {release.digest: release for release in releases}
    for move in reversed(moves(log, alias)):
        if move.digest != now and move.digest in there:
            return there[move.digest]
    raise ReleaseError(f"alias {alias} never named another release", "There is nothing to roll back to.")
