"""Releases: approve with a reason and publish, roll back, and see where every alias pointed on any date."""

from __future__ import annotations

from datetime import UTC, date, datetime

import streamlit as st

from calib.errors import ToolkitError
from calib.progress import Progress
from evals.tradeoff import label
from toolkit.audit import AuditEntry
from toolkit.history import as_of, moves, parse_moment, roll_back, who_am_i
from toolkit.release import Release, list_releases, read_audit
from toolkit.report import words
from toolkit.report.style import SIGNS
from toolkit.target import existing_target, open_target
from toolkit.verifying import verify_releases
from ui import common
from ui.common import Site


def page() -> None:
    here = common.site()
    st.title("Releases", anchor=False)
    known = _targets(here)
    target_name = str(st.selectbox("Target", known, key="target", bind="query-params", help="Where this home has "
                                   "published before. A link can only name one of these; a new one is typed below."))
    releases, log = _read(target_name)
    _publish(here, target_name)
    if not releases:
        common.empty("Nothing has been released here yet", "A release is an engine with its card, evidence and "
                     "statement, under an alias. It needs a passing verdict for exactly that engine.",
                     f"toolkit publish ENGINE --to {target_name} --alias production --home {here.home.path}")
        return
    _aliases(releases, log)
    _list(releases)
    _roll_back(here, target_name, releases, log)
    _verify(target_name)
    _history(log)


def _targets(here: Site) -> list[str]:
    with here.store() as store:
        known = [alias.target for alias in store.aliases()]
    return list(dict.fromkeys([*known, str(here.home.path / "releases")]))


def _read(target: str) -> tuple[list[Release], list[AuditEntry]]:
    try:
        found = existing_target(target)
        return list_releases(found), read_audit(found)
    except ToolkitError as error:
        if error.code != "release":
            st.error(common.plain(f"{error.message}. {error.hint}"))
        return [], []


def _publish(here: Site, target: str) -> None:
    if common.refuse_read_only(here):
        return
    with st.expander("Approve and publish an engine"):
        with here.store() as store:
            rows = {f"{SIGNS[row.verdict or 'BASELINE']} {label(row)} · {run.id}": row for run in
                    store.runs(12, finished=True) for row in (one.row for one in store.rows(run.id)) if row.verdict
                    and row.verdict != "BASELINE"}
        if not rows:
            st.write("No judged engine yet: run a job, or `toolkit gate`.")
            return
        chosen = st.selectbox("Engine", list(rows), key="release-engine", bind="query-params")
        row = rows[chosen]
        st.markdown(f"{common.badge(row.verdict or 'BASELINE')}  {common.plain(row.verdict_reason or '')}")
        with st.form("publish", border=False):
            left, right = st.columns(2)
            alias = left.text_input("Alias", "production", key="alias", help="The name that will point at it.")
            who = right.text_input("Who approves", _me(), key="who")
            to = st.text_input("To", target, key="to", help="A folder, a URL such as s3://bucket/path, or "
                               "hf://owner/name.")
            reason = st.text_input("Why may it go?", key="reason", placeholder="Kept in card, statement and log")
            portable = st.checkbox("With the portable checkpoint too", key="portable")
            override = st.checkbox("Release without a passing verdict; this stays marked", key="override",
                                   disabled=row.verdict == "PASS")
            pressed = st.form_submit_button("Approve and publish", type="primary")
        if pressed:
            _go(here, to.strip() or target, row.engine_digest, alias, who, reason, portable, override)


def _me() -> str:
    try:
        return who_am_i()
    except ToolkitError:
        return ""


def _go(here: Site, target: str, engine: str, alias: str, who: str, reason: str, portable: bool, override: bool
        ) -> None:
    from toolkit.publishing import Wish, publish_anywhere  # brings torch, so only when something is released

    if not who.strip() or not reason.strip():
        st.warning("A release needs a name and a reason.")
        return
    place = st.empty()

    def report(event: Progress) -> None:
        place.progress(min(1.0, event.done / event.total) if event.total else 0.0, text=common.plain(
            f"{event.stage} {event.message}"))

    wish = Wish(alias=alias, reason=reason, who=who, override=reason if override else None,
                parts=("engine", "checkpoint") if portable else ("engine",))
    try:
        with here.store() as store:
            found = store.resolve(engine)
            if found is None or not found[1].is_dir():
                st.error("This engine is not in this home any more.")
                return
            done, where = publish_anywhere(here.home, store, found[1], target, wish, report)
        place.empty()
        st.success(f"Release {done.digest[:12]} is in {where}; {alias} names it now.")
    except ToolkitError as error:
        place.empty()
        st.error(common.plain(f"{error.message}. {error.hint}"))


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
              "model": release.record.name, "verdict": release.record.word,
              "ΔNLL": words.nats_interval(release.record.row.delta_nll), "size": words.size(release.size_bytes),
              "when": release.created[:16].replace("T", " "), "approved by": release.record.approval.who,
              "why": release.record.approval.reason, "release": release.digest[:12]} for release in releases]
    st.dataframe(lines, hide_index=True, width="stretch", key="releases")
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
            who = left.text_input("Who", _me(), key="rollback-who")
            reason = right.text_input("Why?", key="rollback-reason", placeholder="Kept in the log")
            pressed = st.form_submit_button("Roll back")
        if pressed and wanted:
            try:
                with here.store() as store:
                    found = roll_back(store, open_target(target), alias, who, reason, others[wanted])
                st.success(f"{alias} names release {found.digest[:12]} now.")
            except ToolkitError as error:
                st.error(common.plain(f"{error.message}. {error.hint}"))


def _verify(target: str) -> None:
    if st.button("Verify every byte", key="verify", type="tertiary", icon=":material/verified:"):
        with st.spinner("Reading every released byte again"):
            outcome = verify_releases(open_target(target))
        if outcome.faults:
            st.error("\n".join(f"- {common.plain(fault)}" for fault in outcome.faults))
        else:
            st.success(f"{outcome.releases} releases, {outcome.files} files, {words.size(outcome.bytes)}: all as "
                       f"released. Head of the log {outcome.audit_head[:16]}.")


def _history(log: list[AuditEntry]) -> None:
    st.subheader("History", anchor=False)
    first = datetime.fromisoformat(log[0].at).date()
    today = datetime.now(UTC).date()
    place, _ = st.columns([1, 2])
    day: date = place.date_input("Where aliases pointed at the end of", today, min_value=first, max_value=today,
                              key="asof", bind="query-params")
    held = as_of(log, parse_moment(day.isoformat()))
    if held:
        st.dataframe([{"alias": name, "release": move.digest[:12], "since": move.at[:16].replace("T", " "),
                       "who": move.who, "why": move.reason} for name, move in held.items()], hide_index=True,
                     width="stretch", key="held")
    else:
        st.write("No alias pointed anywhere on that day.")
    with st.expander("The whole log"):
        lines = [{"when": entry.at[:19].replace("T", " "), "what": entry.action, "subject": entry.subject[:16],
                  "detail": ", ".join(f"{name} {value[:16]}" for name, value in entry.detail.items()),
                  "hash": entry.hash[:12]} for entry in reversed(log)]
        st.dataframe(lines, hide_index=True, width="stretch", key="log")
        st.caption("Each entry holds the hash of the one before it; `toolkit releases verify` walks the chain.")
        common.frame_exports("log", lines)
