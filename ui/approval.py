"""The forms of the Releases page by which an engine is approved, published, or its approval withdrawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import streamlit as st

from calib.errors import ToolkitError
from calib.progress import Progress
from evals.report import Row
from evals.tradeoff import label
from toolkit.approving import Approved, approve, withdraw
from toolkit.history import who_am_i
from toolkit.report import words
from toolkit.report.style import SIGNS
from toolkit.store import RunStore
from ui import common
from ui.common import Site

T = TypeVar("T")


def candidates(here: Site) -> list[tuple[str, Row]]:
    """(run, row) of engines that may be approved: judged, and no baseline; the newest first, each engine once."""
    with here.store() as store:
        found = [(run.id, one.row) for run in store.runs(12, finished=True) for one in store.rows(run.id)]
    judged = {row.engine_digest: (run, row) for run, row in reversed(found) if row.verdict not in (None, "BASELINE")}
    return list(reversed(judged.values()))


def approve_form(here: Site, rows: list[tuple[str, Row]], held: dict[str, Approved]) -> None:
    with st.expander("Approve an engine"):
        if not rows:
            st.write("No judged engine yet: run a job, or `toolkit gate`.")
            return
        names = {f"{SIGNS[row.verdict or 'BASELINE']} {label(row)} · {run}": row for run, row in rows}
        row = names[st.selectbox("Engine", list(names), key="release-engine", bind="query-params")]
        st.markdown(f"{common.badge(row.verdict or 'BASELINE')}  {common.plain(row.verdict_reason or '')}")
        one = held.get(row.engine_digest)  # always a line, so that the form below keeps its place from engine to engine
        st.caption("Nobody has approved it yet." if one is None else
                   f"{common.plain(one.who)} approved it on {one.at[:10]}: {common.plain(one.reason)}")
        with st.form("approve", border=False):
            left, right = st.columns([1, 2])
            who = left.text_input("Who approves", me(), key="who")
            reason = right.text_input("Why may it go?", key="reason", placeholder="Kept in card, statement and log")
            override = st.checkbox("Without a passing verdict; its releases stay marked", key="override",
                                   disabled=row.verdict == "PASS")
            # Named, so that what is pressed is what was seen: a choice may be under way when the button is hit.
            pressed = st.form_submit_button(common.plain(f"Approve {label(row)}"), type="primary")
        if pressed:
            decide(here, lambda store: approve(store, row.engine_digest, who, reason, override=override),
                   lambda _: f"{label(row)} is approved.")


def publish_form(here: Site, target: str, rows: list[tuple[str, Row]], held: dict[str, Approved]) -> None:
    with st.expander("Publish an approved engine"):
        names = {f"{label(row)} · {run}": row for run, row in rows if row.engine_digest in held}
        if not names:
            st.write("No engine is approved yet. Approving says who lets it go and why; publishing copies it.")
            return
        row = names[st.selectbox("Approved engine", list(names), key="publish-engine")]
        one = held[row.engine_digest]
        st.caption(f"{common.plain(one.who)}, {one.at[:10]}: {common.plain(one.reason)}")
        with st.form("publish", border=False):
            left, middle, right = st.columns([1, 1, 2])
            alias = left.text_input("Alias", "production", key="alias", help="The name that will point at it.")
            who = middle.text_input("Who publishes", me(), key="publisher")
            to = right.text_input("To", target, key="to", help="A folder, a URL such as s3://bucket/path, or "
                                  "hf://owner/name.")
            portable = st.checkbox("With the portable checkpoint too", key="portable")
            pressed = st.form_submit_button(common.plain(f"Publish {label(row)}"), type="primary")
        if pressed:
            _go(here, to.strip() or target, row.engine_digest, alias, who, portable)


def approvals(here: Site, held: dict[str, Approved]) -> None:
    """What is approved now, and taking one back."""
    if not held:
        return
    st.subheader("Approved", anchor=False)
    lines = approved_lines(here, held)
    st.dataframe(lines, hide_index=True, width="stretch", key="approved")
    common.frame_exports("approved", lines)
    if here.read_only:
        return
    with st.expander("Withdraw an approval"), st.form("withdraw", border=False):
        names = {f"{line['engine']} · {line['digest']}": digest for line, digest in zip(lines, held, strict=True)}
        chosen = st.selectbox("Approval", list(names), key="withdraw-engine")
        left, right = st.columns([1, 2])
        who = left.text_input("Who", me(), key="withdraw-who")
        reason = right.text_input("Why is it withdrawn?", key="withdraw-reason", placeholder="Kept in the log")
        if st.form_submit_button("Withdraw"):
            decide(here, lambda store: withdraw(store, names[chosen], who, reason),
                   lambda _: "It is withdrawn. What was published stays until an alias is rolled back.")


def approved_lines(here: Site, held: dict[str, Approved]) -> list[dict[str, str]]:
    with here.store() as store:
        found = {engine: store.row_of_engine(engine) for engine in held}
    return [{"engine": label(known[1].row) if (known := found[engine]) else words.MISSING, "digest": engine[:12],
             "verdict": f"{one.word} (override)" if one.override else one.word, "policy": one.policy or words.MISSING,
             "when": one.at[:16].replace("T", " "), "who": one.who, "why": one.reason}
            for engine, one in held.items()]


def decide(here: Site, act: Callable[[RunStore], T], done: Callable[[T], str]) -> None:
    """Do it and show the page anew with what is ``done``, or say why it could not be done."""
    try:
        with here.store() as store:
            found = act(store)
    except ToolkitError as error:
        st.error(common.plain(f"{error.message}. {error.hint}"))
        return
    st.session_state["said"] = common.plain(done(found))
    st.rerun()


def me() -> str:
    try:
        return who_am_i()
    except ToolkitError:
        return ""


def _go(here: Site, target: str, engine: str, alias: str, who: str, portable: bool) -> None:
    from toolkit.publishing import Wish, publish_anywhere  # brings torch, so only when something is released

    if not who.strip():
        st.warning("A release needs the name of who publishes it.")
        return
    place = st.empty()

    def report(event: Progress) -> None:
        place.progress(min(1.0, event.done / event.total) if event.total else 0.0, text=common.plain(
            f"{event.stage} {event.message}"))

    wish = Wish(alias=alias, who=who.strip(), parts=("engine", "checkpoint") if portable else ("engine",))
    try:
        with here.store() as store:
            found = store.resolve(engine)
            if found is None or not found[1].is_dir():
                st.error("This engine is not in this home any more.")
                return
            done, where = publish_anywhere(here.home, store, found[1], target, wish, report)
    except ToolkitError as error:
        place.empty()
        st.error(common.plain(f"{error.message}. {error.hint}"))
        return
    st.session_state["said"] = common.plain(f"Release {done.digest[:12]} is in {where}; {alias} names it now.")
    st.rerun()
