"""One engine taken apart: its program before and after fusion, memory, limits, and where it comes from."""

from __future__ import annotations

import streamlit as st

from evals.tradeoff import label
from toolkit import evidence as found_evidence
from toolkit.evidence import EngineView
from toolkit.report import plots, structure, words
from ui import common, evidence
from ui.common import Shown


def page() -> None:
    shown = common.run_page("Engine")
    if shown is None:
        return
    row = common.pick_engine(shown)
    view = evidence.engine(str(shown.site.home.store), row.engine_digest)
    if view is None:
        common.empty("This engine is not in this home any more", "Its figures are kept. Running the job again builds "
                     "the same engine again, with the same digest.", f"toolkit run JOB.yaml --home "
                     f"{shown.site.home.path}")
    else:
        _figures(view)
        _program(view)
        _memory(shown)
        _limits(view)
    _chain(shown, row.engine_digest)


def _figures(view: EngineView) -> None:
    program = structure.program_of(view.plan)
    memory = structure.memory_of(view.plan)
    places = st.columns(4)
    places[0].metric("Size on disk", words.size(view.size_bytes))
    places[1].metric("Operations", f"{program.ops_after}", f"{program.ops_before} before fusion", delta_color="off",
                     delta_arrow="off")
    places[2].metric("Memory, planned", words.size(structure.totals(memory)))
    places[3].metric("Computes in", f"{view.plan['compute_dtype']}", f"KV cache {view.plan['kv']['dtype']}",
                     delta_color="off", delta_arrow="off")


def _program(view: EngineView) -> None:
    st.subheader("Program", anchor=False)
    program = structure.program_of(view.plan)
    counted = ("" if program.agrees else " The plan counted another number of operations before fusion than these "
               "stand for; the table is not exact for this model.")
    st.caption(f"What is computed, in order. The left column is what runs; the right one the textbook operations that "
               f"it stands for. {program.layers} layers alike are shown once.{counted}")
    parts = [("before the layers", program.head), (f"in each of {program.layers} layers", program.layer),
             ("after the layers", program.tail)]
    lines = [{"where": where, "after fusion": step.fused, "before fusion": ", ".join(step.before),
              "detail": step.detail} for where, steps in parts for step in steps]
    st.dataframe(lines, hide_index=True, width="stretch", key="program", height="content")
    with st.expander("What each rewrite did"):
        st.dataframe([{"rewrite": step["rewrite"], "operations before": step["ops_before"],
                       "after": step["ops_after"]} for step in view.plan["fusions"]], hide_index=True, width="stretch")
    common.frame_exports("program", lines)


def _memory(shown: Shown) -> None:
    st.subheader("Memory map", anchor=False)
    path = str(shown.site.home.store)
    views = [(label(row), evidence.engine(path, row.engine_digest)) for row in shown.rows]
    engines = [(name, structure.memory_of(view.plan)) for name, view in views if view is not None]
    common.chart(plots.memory_map(engines, common.palette()), "memory", "Planned memory of each engine by use")
    st.caption("Planned before anything is allocated. The KV cache is counted full; on a CPU only what tokens fill is "
               "ever touched.")


def _limits(view: EngineView) -> None:
    st.subheader("Limits", anchor=False)
    st.dataframe([{"limit": name, "value": value} for name, value in structure.limits_of(view.plan)], hide_index=True,
                 width="stretch", key="limits")


def _chain(shown: Shown, digest: str) -> None:
    st.subheader("Where it comes from", anchor=False)
    row = next(row for row in shown.rows if row.engine_digest == digest)
    with shown.site.store() as store:
        links = found_evidence.chain(store, shown.run, row)
    lines = [{"step": link.what, "what": link.name, "here": "✓" if link.found else "gone", "digest": link.digest}
             for link in links]
    st.dataframe(lines, hide_index=True, width="stretch", key="chain",
                 column_config={"here": st.column_config.TextColumn(width="small")})
    with st.expander("Facts of the run"):
        st.dataframe([{"fact": name, "value": value} for name, value in shown.page.facts], hide_index=True,
                     width="stretch")
    common.frame_exports("provenance", lines)
