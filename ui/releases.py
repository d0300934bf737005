"""Releases: approve with a reason, publish, roll back; what was approved and where aliases pointed on any date."""

from __future__ import annotations

from datetime import UTC, date, datetime

import streamlit as st

from calib.errors import ToolkitError
from evals.tradeoff import label
from toolkit.approving import APPROVE, WITHDRAW, standing
from toolkit.audit import AuditEntry
from toolkit.history import as_of, moves, parse_moment, roll_back
from toolkit.release import Release, list_releases, read_audit
from toolkit.report import words
from toolkit.target import existing_target, open_target
from toolkit.verifying import verify_releases
from ui import common
from ui.approval import approvals, approve_form, approved_lines, candidates, decide, me, publish_form
from ui.common import Site


def page() -> None:
    here = common.site()
    st.title("Releases", anchor=False)
    known = _targets(here)
    target_name = str(st.selectbox("Target", known, key="target", bind="query-params", help="Where this home has "
                                   "published before. A link can only name one of these; a new one is typed below."))
    with here.store() as store:
        own_log = store.audit()
    held = standing(own_log)
    notice = st.container(key="notice")  # always there, so that what stands below keeps its place and stays open
    if said := st.session_state.pop("said", None):
        notice.success(said)
    if not common.refuse_read_only(here):
        rows = candidates(here)
        approve_form(here, rows, held)
        publish_form(here, target_name, rows, held)
    read = _read(target_name)
    releases, log = read or ([], [])
    if releases:
        _aliases(releases, log)
        _list(releases)
        _roll_back(here, target_name, releases, log)
        _verify(target_name)
    elif read is not None:
        common.empty("Nothing has been released here yet", "A release is an engine with its card, evidence and "
                     "statement, under an alias. A person approves the engine on its passing verdict, and it is "
                     "published; here or by two commands.",
                     f"toolkit releases approve ENGINE --reason TEXT --home {here.home.path}",
                     f"toolkit publish ENGINE --to {target_name} --alias production --home {here.home.path}")
    approvals(here, held)
    _history(here, log, own_log)


def _targets(here: Site) -> list[str]:
    with here.store() as store:
        known = [alias.target for alias in store.aliases()]
    return list(dict.fromkeys([*known, str(here.home.path / "releases")]))


def _read(target: str) -> tuple[list[Release], list[AuditEntry]] | None:
    """Releases and log of a target, empty where nothing was published; None, said why, where it cannot be read."""
    try:
        found = existing_target(target)
        return list_releases(found), read_audit(found)
    except ToolkitError as error:
        if error.code == "release":
            return [], []
        st.error(common.plain(f"{error.message}. {error.hint}"))
        return None


def _aliases(releases: list[Release], log: list[AuditEntry]) -> None:
    names = sorted({alias for release in releases for alias in release.aliases})
    by_alias = {alias: release for release in releases for alias in release.aliases}
    for column, alias in zip(st.columns(min(4, max(1, len(names)))), names[:4], strict=False):
        release = by_alias[alias]
        last = moves(log, alias)[-1]
        column.metric(alias, label(release.record.row), f"{last.who}, {last.at[:10]}", delta_color="off",
                      delta_arrow="off")


def _list(releases: list[Release]) -> None:
    st.subheader("Released", anchor=False)
    lines = [{"alias": ", ".join(release.aliases) or words.MISSING, "engine": label(release.record.row),
              "verdict": release.record.word, "ΔNLL": words.nats_interval(release.record.row.delta_nll),
              "size": words.size(release.size_bytes), "published": release.created[:16].replace("T", " "),
              "why": release.record.approval.reason, "approved by": release.record.approval.who,
              "by": release.record.publisher, "model": release.record.name,
              "release": release.digest[:12]} for release in releases]
    st.dataframe(lines, hide_index=True, width="stretch", key="releases", column_config={
        "why": st.column_config.TextColumn(width=220)})  # cut off, not pushing the others out of sight
    common.frame_exports("releases", lines)


def _roll_back(here: Site, target: str, releases: list[Release], log: list[AuditEntry]) -> None:
    aliases = sorted({alias for release in releases for alias in release.aliases})
    if here.read_only or not aliases or len(releases) < 2:
        return
    with st.expander("Roll an alias back"):
        alias = st.selectbox("Alias", aliases, key="rollback-alias")
        others = {f"{label(release.record.row)} · {release.digest[:12]} · {release.created[:16].replace('T', ' ')}":
                  release.digest for release in releases if alias not in release.aliases}
        with st.form("rollback", border=False):
            wanted = st.selectbox("To", list(others), key="rollback-to")
            left, right = st.columns([1, 2])
            who = left.text_input("Who", me(), key="rollback-who")
            reason = right.text_input("Why?", key="rollback-reason", placeholder="Kept in the log")
            pressed = st.form_submit_button("Roll back")
        if pressed and wanted:
            decide(here, lambda store: roll_back(store, open_target(target), alias, who, reason, others[wanted]),
                   lambda release: f"{alias} names release {release.digest[:12]} now.")


def _verify(target: str) -> None:
    if st.button("Verify every byte", key="verify", type="tertiary", icon=":material/verified:"):
        with st.spinner("Reading every released byte again"):
            outcome = verify_releases(open_target(target))
        if outcome.faults:
            st.error("\n".join(f"- {common.plain(fault)}" for fault in outcome.faults))
        else:
            st.success(f"{outcome.releases} releases, {outcome.files} files, {words.size(outcome.bytes)}: all as "
                       f"released. Head of the log {outcome.audit_head[:16]}.")


def _history(here: Site, log: list[AuditEntry], own_log: list[AuditEntry]) -> None:
    """Aliases of the target and approvals of this home at the end of any day, and both logs."""
    decisions = [entry for entry in own_log if entry.action in (APPROVE, WITHDRAW)]
    if not log and not decisions:
        return
    st.subheader("History", anchor=False)
    first = min(datetime.fromisoformat(entry.at).date() for entry in [*log[:1], *decisions[:1]])
    today = datetime.now(UTC).date()
    place, _ = st.columns([1, 2])
    day: date = place.date_input("How it stood at the end of", today, min_value=first, max_value=today,
                                 key="asof", bind="query-params")
    moment = parse_moment(day.isoformat())
    if aliases := as_of(log, moment):
        st.dataframe([{"alias": name, "release": move.digest[:12], "since": move.at[:16].replace("T", " "),
                       "who": move.who, "why": move.reason} for name, move in aliases.items()], hide_index=True,
                     width="stretch", key="held")
    else:
        st.write("No alias of this target pointed anywhere on that day.")
    if then := standing(own_log, moment):
        st.dataframe(approved_lines(here, then), hide_index=True, width="stretch", key="approved-then")
    else:
        st.write("No engine was approved on that day.")
    _logs("The whole log of this target", "log", log)
    _logs("Approvals and withdrawals of this home", "decisions", decisions)


def _logs(title: str, key: str, entries: list[AuditEntry]) -> None:
    if not entries:
        return
    with st.expander(title):
        lines = [{"when": entry.at[:19].replace("T", " "), "what": entry.action, "subject": entry.subject[:16],
                  "detail": ", ".join(f"{name} {value[:12] if len(value) == 64 else value}"
                                      for name, value in entry.detail.items() if value),
                  "hash": entry.hash[:12]} for entry in reversed(entries)]
        st.dataframe(lines, hide_index=True, width="stretch", key=key)
        st.caption("Each entry holds the hash of the one before it; `toolkit releases verify` walks the chain.")
        common.frame_exports(key, lines)
