"""Latency: figures over load and length, goodput within objectives, percentiles of endpoints, kernels and floors."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from evals.loads import Objectives
from evals.metric import METRICS
from evals.report import LatencySweep, Row
from evals.tradeoff import label
from toolkit import evidence as found_evidence
from toolkit.report import charts, plots, speed, structure, words
from toolkit.report.axes import COST
from toolkit.store import RunStore
from ui import common, evidence
from ui.common import Shown

_FIGURES = ("tpot_ms", "ttft_ms", "out_tok_s")


def page() -> None:
    shown = common.run_page("Latency")
    if shown is None:
        return
    if not any(row.cells for row in shown.rows):
        common.empty("No cells were measured", "A sweep measures time to first token, time per output token and "
                     "throughput over batch sizes and lengths.",
                     f"toolkit sweep ENGINE --cells 1x32x24,8x32x24 --home {shown.site.home.path}")
        return
    rows, endpoints, known = _pick(shown)
    _figures(rows, endpoints)
    _objectives(rows, endpoints)
    _percentiles(shown, endpoints, known)
    _cells(shown, rows, endpoints)
    _kernels(shown)


@st.cache_data(max_entries=8, show_spinner=False)
def _endpoints(path: str, swept: tuple[str, ...]) -> list[LatencySweep]:
    """``swept``: the sweeps that there are; a new one is read at once."""
    with RunStore(Path(path)) as store:
        return speed.told_apart(found_evidence.endpoint_sweeps(store))


def _pick(shown: Shown) -> tuple[list[Row], list[LatencySweep], int]:
    """(engines, endpoints, how many endpoints there are to choose from)."""
    names = {label(row): row for row in shown.rows if row.cells}
    chosen = st.pills("Engines", list(names), selection_mode="multi", default=list(names), key="engines",
                      bind="query-params")
    with shown.site.store() as store:
        swept = tuple(path.name for path in store.artifacts("latency-sweep"))
    sweeps = {sweep.target.name: sweep for sweep in _endpoints(str(shown.site.home.store), swept)}
    also = st.pills("Endpoints", list(sweeps), selection_mode="multi", key="endpoints",
                    bind="query-params") if sweeps else []
    return [names[name] for name in chosen or ()], [sweeps[name] for name in also or ()], len(sweeps)


def _figures(rows: list[Row], endpoints: list[LatencySweep]) -> None:
    cells = [cell for row in rows for cell in row.cells] + [cell for sweep in endpoints for cell in sweep.cells]
    usable = {title: field for field, title in charts.OVER.items() if len({getattr(cell, field) for cell in cells}) > 1}
    if not cells:
        st.info("Choose an engine above.")
        return
    over = "batch_size"
    if len(usable) > 1:
        chosen = st.segmented_control("Over", list(usable), default=next(iter(usable)), key="over",
                                      bind="query-params", required=True)
        over = usable[chosen or next(iter(usable))]
    common.legend(rows, [sweep.target.name for sweep in endpoints])
    columns = st.columns(3, gap="medium")
    for column, key in zip(columns, _FIGURES, strict=True):
        with column:
            st.markdown(f"**{COST[key].title}**, {COST[key].unit}")
            common.chart(charts.latency(rows, key, common.palette(), 290, over, endpoints, legend=False),
                         f"latency-{key}", f"{COST[key].title} over {charts.OVER[over].lower()}, one line an engine")
    st.caption("Bars are the range that the repeats covered. " + " ".join(
        f"{COST[key].title}: {METRICS[key].better} is better." for key in _FIGURES))


def _objectives(rows: list[Row], endpoints: list[LatencySweep]) -> None:
    st.subheader("Goodput within objectives", anchor=False)
    own, others = [cell for row in rows for cell in row.cells], [cell for one in endpoints for cell in one.cells]
    cells = [cell for cell in (*own, *others) if cell.invalid is None]
    left, right = st.columns(2)
    ttft = _objective(left, "TTFT at most", "slo_ttft", [cell.ttft_ms for cell in cells if cell.ttft_ms])
    tpot = _objective(right, "TPOT at most", "slo_tpot", [cell.tpot_ms for cell in cells if cell.tpot_ms])
    if ttft is None and tpot is None:
        st.caption("Set a limit: the table then says how many requests a second each engine serves within it.")
        return
    lines = [{"engine": line.name, "requests/s within": line.goodput_req_s, "best load": _load(line),
              "TTFT ms": line.best.ttft_ms if line.best else None, "TPOT ms": line.best.tpot_ms if line.best else None,
              "output tok/s": line.best.out_tok_s if line.best else None, "loads within": f"{line.met} of {line.cells}"}
             for line in speed.served(rows, endpoints, Objectives(ttft_ms=ttft, tpot_ms=tpot))]
    st.dataframe(lines, hide_index=True, width="stretch", key="goodput", column_config={
        name: st.column_config.NumberColumn(format=form) for name, form in (
            ("requests/s within", "%.2f"), ("TTFT ms", "%.1f"), ("TPOT ms", "%.2f"), ("output tok/s", "%.1f"))})
    st.caption("All requests of a batch share its times, so a batch is within the objectives as a whole. For an "
               "endpoint a load counts when its medians are within them.")
    common.frame_exports("goodput", lines)


def _load(line: speed.Served) -> str:
    best = line.best
    return f"{best.batch_size} at a time, {best.isl} in, {best.osl} out" if best else words.MISSING


def _objective(place: st.delta_generator.DeltaGenerator, name: str, key: str, values: list[float]) -> float | None:
    options = common.steps(values)
    with place:
        chosen = st.select_slider(name, options, value=common.ANY, key=key, bind="query-params",
                                  disabled=len(options) < 2, format_func=lambda value: value if value == common.ANY else
                                  f"{value} ms")
    return None if chosen == common.ANY else float(chosen)


def _percentiles(shown: Shown, endpoints: list[LatencySweep], known: int) -> None:
    st.subheader("Percentiles of endpoints", anchor=False)
    lines = speed.percentiles(endpoints)
    if not lines:
        st.write("Choose an endpoint above." if known else "An engine in process is timed as a batch. Percentiles over "
                 "requests come from a server under load: start one, and sweep it.")
        if not known:
            st.code(f"toolkit serve ENGINE --port 8000 --home {shown.site.home.path}\n"
                    "toolkit sweep --url http://127.0.0.1:8000 --model NAME --tokenizer ENGINE --lengths 512x64 "
                    f"--concurrency 1,4,16 --home {shown.site.home.path}", language=None)
        return
    if all(line["not valid because"] for line in lines):
        st.write("No load of these endpoints is valid, so none is drawn; the table says why.")
    else:
        _percentile_charts(endpoints)
    st.dataframe(lines, hide_index=True, width="stretch", key="percentiles", column_config={
        name: st.column_config.NumberColumn(name, format="%.2f") for name in lines[0] if name[:4] in ("TTFT", "TPOT")})
    common.frame_exports("percentiles", lines)


def _percentile_charts(endpoints: list[LatencySweep]) -> None:
    common.legend([], [sweep.target.name for sweep in endpoints])
    for column, key in zip(st.columns(2, gap="medium"), ("ttft_ms", "tpot_ms"), strict=True):
        with column:
            st.markdown(f"**{COST[key].title}**, {COST[key].unit}")
            common.chart(plots.percentiles(endpoints, key, COST[key].unit, common.palette()), f"percentiles-{key}",
                         f"p50, p90 and p99 of {COST[key].title} over load; the table below holds the same figures")
    st.caption("Solid p50, dashed p90, dotted p99: over the requests of each load, by linear interpolation; p99 only "
               "from 100 requests on. Lines are medians over the runs, the table has every run.")


def _cells(shown: Shown, rows: list[Row], endpoints: list[LatencySweep]) -> None:
    named = [(label(row), row.cells) for row in rows] + [(sweep.target.name, sweep.cells) for sweep in endpoints]
    lines = [{"engine": name, "mode": cell.mode, "at a time": cell.batch_size,
              "in": None if cell.answered == 0 else cell.isl, "out": None if cell.answered == 0 else cell.osl,
              "TTFT ms": cell.ttft_ms, "± TTFT": cell.ttft_ms_spread, "TPOT ms": cell.tpot_ms,
              "± TPOT": cell.tpot_ms_spread, "output tok/s": cell.out_tok_s, "repeats": cell.n,
              "not valid because": cell.invalid or ""} for name, cells in named for cell in cells]
    with st.expander(f"All {len(lines)} cells"):
        number = st.column_config.NumberColumn
        st.dataframe(lines, hide_index=True, width="stretch", key="cells", column_config={
            name: number(format="%.2f") for name in ("TTFT ms", "± TTFT", "TPOT ms", "± TPOT", "output tok/s")})
        st.caption("Medians over the repeats; ± is the range they covered.")
        common.frame_exports(f"{shown.run.id}-cells", lines)


def _kernels(shown: Shown) -> None:
    st.subheader("Kernels and their floor", anchor=False)
    row = common.pick_engine(shown)
    view = evidence.engine(str(shown.site.home.store), row.engine_digest)
    if view is None:
        st.write("This engine's folder is not in this home any more, so its kernel table cannot be read.")
        return
    kernels, floor = structure.kernels_of(view.plan, view.timings)
    if not kernels:
        st.write("Tuning kept no times for this engine: it was built with `--tune none`, or from a cache without them.")
        return
    lines = [{"linear": structure.shape_name(kernel, view.plan), "operator": kernel.impl, "tokens": kernel.tokens,
              "time, ms": kernel.milliseconds, "GB/s": kernel.gigabytes_s,
              "of the floor": None if kernel.fraction is None else 100 * kernel.fraction} for kernel in kernels]
    config = {"of the floor": st.column_config.ProgressColumn(min_value=0.0, max_value=100.0, format="%.0f %%"),
              "time, ms": st.column_config.NumberColumn(format="%.3f"),
              "GB/s": st.column_config.NumberColumn(format="%.1f")}
    st.dataframe(lines, hide_index=True, width="stretch", key="kernels", column_config=config)
    st.caption(f"One token at a time reads every weight once, so memory bandwidth is the floor. The share is {floor}.")
    common.frame_exports("kernels", lines)
