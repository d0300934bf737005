"""Accuracy: per task with paired differences, flips in words, delta NLL by document, what the engine itself adds."""

from __future__ import annotations

from dataclasses import asdict

import streamlit as st

from evals.report import Row
from evals.tradeoff import label
from toolkit.report import answers, charts, plots, words
from toolkit.report.answers import Flip
from ui import common, evidence
from ui.common import Shown
from ui.evidence import Judged

PER_PAGE = 10
_SIDES = {"All flips": None, "Right to wrong": True, "Wrong to right": False}


def page() -> None:
    shown = common.run_page("Accuracy")
    if shown is None:
        return
    _overview(shown)
    row = common.pick_engine(shown, skip_baseline=True)
    both = evidence.judged(str(shown.site.home.store), shown.run.id, shown.run.finished or "", row.engine_digest)
    if both.report is None:
        common.empty("The answers are not in this home", "The figures of this run are kept, the judgement item by item "
                     "is not here any more. Running the job again makes it again.",
                     f"toolkit run examples/demo.yaml --home {shown.site.home.path}")
        return
    _tasks(both)
    _flips(shown, both)
    _documents(shown, row, both)
    _agreement(shown)


def _overview(shown: Shown) -> None:
    found = evidence.losses(str(shown.site.home.store), shown.run.id, shown.run.finished or "")
    lines = [(label(row), found[row.engine_digest], common.palette().of(row.recipe, number))
             for number, row in enumerate(shown.rows) if row.engine_digest in found and row.verdict != "BASELINE"]
    if lines:
        st.caption("Accuracy lost on the same questions as the unquantized model. Left of the line is a gain; an "
                   "interval that crosses it says that no difference was seen.")
        common.chart(plots.intervals(lines, "Points of accuracy lost, paired, 95 %", common.palette()), "losses",
                     "Paired loss of accuracy of each engine with its interval")


def _tasks(both: Judged) -> None:
    st.subheader("Tasks", anchor=False)
    assert both.report is not None
    lines = [{"task": line.task, "accuracy": words.percent_interval(line.accuracy), "questions": line.accuracy.n,
              "baseline": words.percent(line.baseline), "lost, points": words.points(line.loss),
              "right to wrong": line.to_wrong, "wrong to right": line.to_right,
              "p (Holm)": words.number(line.p, 3)} for line in answers.task_lines(both.report, both.baseline)]
    st.dataframe(lines, hide_index=True, width="stretch", key="tasks")
    common.frame_exports("tasks", lines)


def _flips(shown: Shown, both: Judged) -> None:
    st.subheader("Flips", anchor=False)
    if both.report is None or both.baseline is None:
        st.write("The baseline's answers are not in this home, so no answer can be compared.")
        return
    asked = evidence.questions(str(shown.site.home.path), both.report.data_digest)
    found = answers.flips(both.report, both.baseline, asked)
    if not found:
        st.write("Every question was answered as by the unquantized model.")
        return
    side = st.segmented_control("Show", list(_SIDES), default="All flips", key="flips", bind="query-params",
                                required=True)
    wanted = _SIDES[side or "All flips"]
    kept = [flip for flip in found if wanted is None or flip.to_wrong is wanted]
    pages = max(1, -(-len(kept) // PER_PAGE))
    number = st.number_input(f"Page of {pages}", 1, pages, 1, key="page", bind="query-params") if pages > 1 else 1
    st.caption(f"{len(kept)} of {len(both.report.items)} questions, the most harmful first. The margin is how far the "
               "right answer was ahead of the best other one; below zero it lost.")
    for flip in kept[(number - 1) * PER_PAGE:number * PER_PAGE]:
        _flip(flip)
    st.download_button("All flips as CSV", lambda: common.export.lines_as([asdict(flip) for flip in found], "csv"),
                       file_name="flips.csv", mime="text/csv", key="flips-csv", type="tertiary", on_click="ignore",
                       icon=":material/download:")


def _flip(flip: Flip) -> None:
    mark = ":red-badge[✕ right to wrong]" if flip.to_wrong else ":green-badge[✓ wrong to right]"
    question = flip.question if len(flip.question) < 130 else flip.question[:130] + "…"
    with st.expander(f"{mark}  {common.plain(question)}"):
        if question != flip.question:
            st.markdown(common.plain(flip.question))
        st.markdown(f"**Right answer**  {common.plain(flip.right)}")
        left, right = st.columns(2)
        left.caption("Unquantized model")
        left.markdown(common.plain(flip.baseline))
        left.caption(f"margin {words.number(flip.baseline_margin, 3, signed=True)}")
        right.caption("This engine")
        right.markdown(common.plain(flip.engine))
        right.caption(f"margin {words.number(flip.engine_margin, 3, signed=True)}")
        st.caption(f"{flip.task}, question `{flip.id[:16]}`")


def _documents(shown: Shown, row: Row, both: Judged) -> None:
    if both.report is None or both.baseline is None or not both.report.texts:
        return
    st.subheader("ΔNLL by document", anchor=False)
    lines = answers.documents(both.report, both.baseline)
    colors = common.palette()
    common.chart(plots.by_document(lines, colors, colors.of(row.recipe)), "documents",
                 "Delta NLL of every document, sorted")
    st.caption(f"Over all documents {words.nats_interval(row.delta_nll)} nats per token. One dot a document; its area "
               "grows with its tokens.")
    with st.expander("The documents in a table"):
        table = [{"document": line.document, "ΔNLL, nats/token": round(line.delta, 5), "tokens": line.tokens,
                  "same top-1": words.percent(line.same_top1)} for line in lines]
        st.dataframe(table, hide_index=True, width="stretch")
        st.download_button("CSV", lambda: common.export.lines_as(table, "csv"), file_name="documents.csv",
                           key="documents-csv", type="tertiary", icon=":material/download:", on_click="ignore")


def _agreement(shown: Shown) -> None:
    pairs = [pair for row, delta in zip(shown.rows, shown.page.model_deltas, strict=True)
             if (pair := words.agreement(row, delta))]
    if pairs:
        st.subheader("Does the engine add loss of its own?", anchor=False)
        st.caption("ΔNLL of the fake-quantized model in memory beside that of the engine built from its checkpoint, on "
                   "the same texts.")
        common.chart(charts.agreement(pairs, common.palette()), "agreement",
                     "Delta NLL of each engine beside its model in memory")
