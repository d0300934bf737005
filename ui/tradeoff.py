"""The tradeoff page: what each precision costs in quality and buys in speed, how sure that is, and which to take.

Widgets only. Rows, frontier, recommendation and figures come from ``toolkit``; the choices (run, axes) live in the URL
under the words that the page shows (bound widgets write their labels), so a view can be sent or bookmarked.
"""

from __future__ import annotations

from typing import Any

import streamlit as st

from evals.tradeoff import label
from toolkit.home import Home
from toolkit.report import axes, charts, choice, export, tables, words
from toolkit.report.html import Page
from toolkit.report.style import DARK, LIGHT, SIGNS, Palette
from toolkit.store import Run, RunStore

_BADGES = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow", "ANOMALOUS": "violet", "BASELINE": "gray"}


def page(home: Home) -> None:
    """The whole page for one home folder."""
    st.title("Precision and latency", anchor=False)
    with RunStore(home.store) as store:
        finished = [run for run in store.runs(limit=500) if run.finished]
    _running(home)
    if not finished:
        _empty(home)
        return
    run = _pick_run(finished)
    shown = _load(str(home.store), run.id, run.finished or "")
    st.caption(_plain(f"{run.job}, {run.facts.get('model', '')} on {run.facts.get('device', '')}, finished "
                      f"{(run.finished or '')[:16].replace('T', ' ')} UTC"))
    with st.container(key="recommendation"):
        st.markdown(_plain(shown.recommendation))
    selected = _tradeoff(shown)
    _table(shown)
    _verdicts(shown, selected)
    _agreement(shown)
    _latency(shown)
    _provenance(shown, run)


def _palette() -> Palette:
    return DARK if st.context.theme.type == "dark" else LIGHT


def _plain(text: str) -> str:
    """Text that Streamlit's Markdown shows as it is: no directives, emoji codes, formulas or HTML."""
    escaped = tables.escape_markdown(text)
    for character in "$:~":
        escaped = escaped.replace(character, f"\\{character}")
    return escaped


def _empty(home: Home) -> None:
    st.subheader("No finished run yet", anchor=False)
    st.write("A run calibrates a model, builds engines, judges them and measures their speed. The demo takes about ten "
             "minutes on two cores; this page shows it as soon as it is finished.")
    st.code(f"toolkit data prepare --home {home.path}\ntoolkit run examples/demo.yaml --home {home.path}",
            language="bash")


@st.fragment(run_every=3.0)
def _running(home: Home) -> None:
    """Runs that go on now. Polls the store; reloading the page or a second tab changes nothing for them."""
    with RunStore(home.store) as store:
        for job in store.running():
            st.progress(min(1.0, job.done / job.total) if job.total else 0.0,
                        text=f"Run {_plain(job.run)}, {_plain(job.stage)}")


def _pick_run(runs: list[Run]) -> Run:
    by_id = {run.id: run for run in runs}  # newest first
    return by_id[st.selectbox("Run", list(by_id), key="run", bind="query-params")]


@st.cache_data(max_entries=32, show_spinner=False)
def _load(path: str, run: str, finished: str) -> Page:
    """The view of a run; ``finished`` is part of the key, so that a run done again is read again."""
    from pathlib import Path

    with RunStore(Path(path)) as store:
        return export.page_of(store, store.find_run(run))


def _pick_axes(shown: Page) -> tuple[axes.Axis, axes.Axis] | None:
    table = tables.frame(shown.rows)
    quality = {axis.title: axis for axis in axes.usable(table, axes.QUALITY)}
    cost = {axis.title: axis for axis in axes.usable(table, axes.COST)}
    if not quality or not cost:
        return None
    left, right = st.columns(2)
    y = left.selectbox("Quality", list(quality), key="quality", bind="query-params")
    x = right.selectbox("Cost", list(cost), key="cost", bind="query-params")
    return cost[x], quality[y]


def _tradeoff(shown: Page) -> str | None:
    """Draw the scatter; returns the engine digest that the reader clicked, if any."""
    picked = _pick_axes(shown)
    if picked is None:
        st.info("This run has no engine with both a quality and a cost figure; the table below shows what it has.")
        return None
    x, y = picked
    figure = charts.tradeoff(tables.frame(shown.rows), x, y, choice.standings(shown.rows, x, y),
                             _palette(), shown.margin)
    event: Any = st.plotly_chart(figure, theme=None, key="tradeoff", on_select="rerun", selection_mode="points",
                                 config={"displayModeBar": False})
    st.caption("Bars are 95 % intervals (quality) and the range of the repeats (time). The dotted line joins the "
               "engines that no other beats on both axes. Click a point for its verdict.")
    points = event["selection"]["points"] if event else []
    return str(points[0]["customdata"]) if points and points[0].get("customdata") else None


def _table(shown: Page) -> None:
    st.subheader("Engines", anchor=False)
    table = tables.frame(shown.rows)
    table["verdict"] = [f"{SIGNS[row.verdict]} {row.verdict}" if row.verdict else words.MISSING for row in shown.rows]
    for axis in (*axes.QUALITY.values(), *axes.COST.values()):
        table[axis.key] = table[axis.key] * axis.scale
    table["interval"] = [words.nats_interval(row.delta_nll).partition(" ")[2] or words.MISSING for row in shown.rows]
    number = st.column_config.NumberColumn
    columns = {
        "engine": st.column_config.TextColumn("Engine", pinned=True),
        "verdict": st.column_config.TextColumn("Verdict"),
        "delta_nll": number("ΔNLL", help="nats per token against the unquantized model", format="%+.4f"),
        "interval": st.column_config.TextColumn("95 %", help="interval of ΔNLL, clustered by document"),
        "accuracy": number("Accuracy %", format="%.1f"),
        "flips": number("Flips %", help="answers that changed against the baseline", format="%.1f"),
        "same_top1": number("Top-1 %", help="tokens whose most probable next token is the same", format="%.1f"),
        "ttft_ms": number("TTFT ms", format="%.1f"), "tpot_ms": number("TPOT ms", format="%.2f"),
        "out_tok_s": number("Tokens/s", format="%.1f"), "size_bytes": number("Size MB", format="%.0f"),
        "peak_memory_bytes": number("Memory MB", format="%.0f")}
    st.dataframe(table[list(columns)], column_config=columns, hide_index=True, key="engines", width="stretch")
    st.caption(" ".join(_plain(line) for line in tables.caption(shown.rows)))


def _badge(word: str) -> str:
    return f":{_BADGES[word]}-badge[{SIGNS[word]} {word}]"


def _verdicts(shown: Page, selected: str | None) -> None:
    st.subheader("Verdicts", anchor=False)
    for row in shown.rows:
        if row.verdict is None:
            continue
        with st.expander(f"{_badge(row.verdict)}  **{_plain(label(row))}**  {_plain(row.verdict_reason or '')}",
                         expanded=row.engine_digest == selected):
            reasons = shown.reasons.get(row.engine_digest, ())
            if reasons:
                st.dataframe([{"check": reason.check, "verdict": f"{SIGNS[reason.word]} {reason.word}",
                               "found": reason.found, "allowed": reason.allowed} for reason in reasons],
                             hide_index=True, width="stretch")
            st.caption(f"engine `{row.engine_digest}`")


def _agreement(shown: Page) -> None:
    pairs = [pair for row, delta in zip(shown.rows, shown.model_deltas, strict=True)
             if (pair := words.agreement(row, delta))]
    if pairs:
        st.subheader("Does the engine add loss of its own?", anchor=False)
        st.caption("ΔNLL of the fake-quantized model in memory beside that of the engine built from its checkpoint, on "
                   "the same texts.")
        st.plotly_chart(charts.agreement(pairs, _palette()), theme=None, key="agreement",
                        config={"displayModeBar": False})


def _latency(shown: Page) -> None:
    if not any(row.cells for row in shown.rows):
        return
    st.subheader("Latency over batch size", anchor=False)
    left, right = st.columns(2)
    for column, key in ((left, "tpot_ms"), (right, "out_tok_s")):
        column.caption(axes.COST[key].title)
        column.plotly_chart(charts.latency(shown.rows, key, _palette()), theme=None, key=f"latency-{key}",
                            config={"displayModeBar": False})


def _provenance(shown: Page, run: Run) -> None:
    with st.expander("Where this comes from"):
        st.dataframe([{"fact": name, "value": value} for name, value in shown.facts], hide_index=True, width="stretch")
        st.dataframe([{"engine": label(row), "checkpoint": row.checkpoint_digest, "engine digest":
                       row.engine_digest} for row in shown.rows], hide_index=True, width="stretch")
    st.download_button("Table as CSV", tables.csv(shown.rows), file_name=f"{run.id}.csv", mime="text/csv",
                       icon=":material/download:", key="csv")
