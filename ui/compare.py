"""Two to five runs side by side, what differs highlighted; and the engines' own words on the reader's prompt."""

from __future__ import annotations

import difflib
import json

import streamlit as st

from calib.errors import ToolkitError
from evals.report import Row
from evals.tradeoff import label
from toolkit import jobs
from toolkit.jobs import JobTable, Work
from toolkit.report import several, words
from toolkit.store import Run
from ui import common
from ui.common import Site

PROMPT_LIMIT = 2000


def page() -> None:
    here = common.site()
    st.title("Compare", anchor=False)
    with here.store() as store:
        total = store.count_runs(finished=True)
        if not total:
            common.empty("No finished run yet", "Two runs can be compared as soon as there are two.",
                         f"toolkit run examples/demo.yaml --home {here.home.path}")
            return
        runs = _pick(here, total)
        rows = [[stored.row for stored in store.rows(run.id)] for run in runs]
    if len(runs) > 1:
        _differences(runs, rows)
    else:
        st.caption("Choose a second run to see what differs.")
    _words(here, runs, rows)


def _pick(here: Site, total: int) -> list[Run]:
    words_found = st.text_input("Find runs", key="find", bind="query-params", persist_state="session",
                                placeholder=f"Part of a job, model or id ({total:,} runs)") if total > common.LISTED \
        else ""
    with here.store() as store:
        found = {run.id: run for run in store.runs(common.LISTED, search=words_found or "", finished=True)}
        asked = st.session_state.get("runs") or st.query_params.get_all("runs")
        for name in asked:
            if name not in found and (older := store.runs(1, search=str(name), finished=True)):
                found |= {older[0].id: older[0]}
    chosen = st.multiselect("Runs", list(found), default=list(found)[:2], max_selections=several.MOST, key="runs",
                            bind="query-params", help="The first one is what the others are compared with.")
    return [found[name] for name in chosen]


def _differences(runs: list[Run], rows: list[list[Row]]) -> None:
    st.subheader("How they were made", anchor=False)
    facts = several.facts(runs)
    if facts:
        st.dataframe(facts, hide_index=True, width="stretch", key="facts")
    else:
        st.write("All facts that are kept of these runs are the same.")
    reasons = several.comparable(runs)
    if reasons:
        st.warning(f"Figures of these runs say nothing about each other: {' and '.join(reasons)}.")
        return
    st.subheader("What came out", anchor=False)
    found = several.figures(rows)
    only = st.toggle("Only what differs beyond the noise", key="differs", bind="query-params")
    shown = [line for line in found if line.seen or not only]
    if not shown:
        st.write("Nothing differs beyond the intervals and the range of the repeats.")
        return
    lines = [{"engine": line.engine, "figure": f"{line.axis.title}, {line.axis.unit}",
              **{run.id: _cell(line, place) for place, run in enumerate(runs)}} for line in shown]
    st.dataframe(lines, hide_index=True, width="stretch", key="figures", height="content")
    st.caption("▲ higher and ▼ lower than in the first run, beyond the intervals (quality) or the range of the repeats "
               "(time); a size without either is marked when it is not the same. No mark: no difference was seen.")
    common.frame_exports("compare", lines)


def _cell(line: several.Figures, place: int) -> str:
    text, first = (several.written(line.values[at], line.axis) for at in (place, 0))
    change = line.changes[place]
    if text == first:  # a difference below what is written is none to a reader
        return text
    if change is None or not change.seen or change.first is None or change.second is None:
        return text
    higher = change.second > change.first
    said = f" {'worse' if higher == line.axis.lower_is_better else 'better'}" if line.axis.directed else ""
    return f"{'▲' if higher else '▼'} {text}{said}"


def _words(here: Site, runs: list[Run], rows: list[list[Row]]) -> None:
    st.subheader("In their own words", anchor=False)
    engines = {f"{label(row)} · {run.id}": row.engine_digest for run, one in zip(runs, rows, strict=True)
               for row in one}
    if not engines:
        return
    chosen = st.multiselect("Engines", list(engines), default=list(engines)[:2], max_selections=4, key="speakers",
                            bind="query-params")
    prompt = st.text_area("Your prompt", key="prompt", bind="query-params", max_chars=PROMPT_LIMIT,
                          placeholder="The prompt that matters to you") or ""
    tokens = st.select_slider("Tokens", [16, 32, 64, 128, 256], value=64, key="tokens", bind="query-params")
    if common.refuse_read_only(here):
        return
    if st.button("Generate", type="primary", disabled=not prompt.strip() or not chosen, key="generate"):
        for name in chosen:
            with here.store() as store:
                place = store.resolve(engines[name])
            if place is None:
                st.error(f"{common.plain(name)} is not in this home any more.")
                continue
            try:
                jobs.start(here.home, "generate", _arguments(str(place[1]), prompt, tokens))
            except ToolkitError as error:
                st.warning(common.plain(f"{error.message}. {error.hint}"))
    _answers(here, chosen, engines, prompt, tokens)


def _arguments(path: str, prompt: str, tokens: int) -> list[str]:
    return [path, "-p", prompt, "--max-tokens", str(tokens)]


@st.fragment(run_every=2.0)
def _answers(here: Site, chosen: list[str], engines: dict[str, str], prompt: str, tokens: int) -> None:
    """The newest answers to this prompt; a job that goes on shows its stage. Polls the job table only."""
    if not prompt.strip() or not chosen:
        return
    with here.store() as store, JobTable(here.home.store) as table:
        recent = [work for work in table.list(60) if work.verb == "generate"]
        found = {}
        for name in chosen:
            place = store.resolve(engines[name])
            wanted = _arguments(str(place[1]), prompt, tokens) if place else None
            same = [work for work in recent if work.arguments == wanted]
            found[name] = next((work for work in same if work.state == "finished"), same[0] if same else None)
    if not any(found.values()):
        return
    texts = {name: _text(here, work) for name, work in found.items()}
    first = next((text for text in texts.values() if text is not None), None)
    for column, (name, work) in zip(st.columns(len(chosen)), found.items(), strict=True):
        with column:
            st.caption(common.plain(name))
            text = texts[name]
            if text is not None:
                st.markdown(_marked(first or "", text))
            elif work is not None:
                st.write(f"{work.state}{', ' + work.stage if work.stage else ''}")


def _text(here: Site, work: Work | None) -> str | None:
    if work is None or work.state != "finished":
        return None
    try:
        document = json.loads(jobs.output_of(here.home, work.id).read_text(encoding="utf-8"))
        return str(document["text"])
    except (OSError, ValueError, KeyError, TypeError):
        return "(its answer is not here any more)"


def _marked(first: str, text: str) -> str:
    """The text with what differs from the first one in bold."""
    if first == text:
        return common.plain(text) or words.MISSING
    left, right = first.split(), text.split()
    parts = []
    for tag, _, _, begin, end in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        piece = common.plain(" ".join(right[begin:end]))
        if piece:
            parts.append(piece if tag == "equal" else f"**{piece}**")
    return " ".join(parts) or words.MISSING
