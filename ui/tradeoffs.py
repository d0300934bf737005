"""What each precision costs in quality and buys in speed, how sure that is, and which one to take.

Constraints lead to one recommended engine with its reason in a sentence; the chart shows where it stands, the table
holds the same rows. All choices live in the URL.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import streamlit as st

from evals.metric import METRICS
from evals.tradeoff import Constraints, label
from toolkit.report import axes, charts, choice, export, tables, words
from toolkit.report.style import SIGNS
from toolkit.store import RunStore
from ui import common
from ui.common import Shown
from ui.evidence import losses

_PREFER = ("tpot_ms", "ttft_ms", "out_tok_s", "peak_memory_bytes", "size_bytes", "delta_nll", "accuracy")


def page() -> None:
    shown = common.run_page("Tradeoffs")
    if shown is None:
        return
    sentence = st.container(key="recommendation")
    left, right = st.columns([1, 2.9], gap="large")
    with left:
        limits, max_loss, price = _constraints(shown)
    lost = losses(str(shown.site.home.store), shown.run.id, shown.run.finished or "") if max_loss is not None else {}
    decision = choice.decide(shown.rows, limits, lost, max_loss)
    sentence.markdown(common.plain(decision.sentence))
    table = axes.derive(tables.frame(shown.rows), shown.rows, price)
    with right:
        selected = _chart(shown, table, decision, price)
    _table(shown, table, decision)
    _verdicts(shown, selected)


def _limit(name: str, key: str, options: list[str], unit: str, help: str) -> float | None:
    chosen = st.select_slider(name, options, value=common.ANY, key=key, bind="query-params", help=help,
                              format_func=lambda value: value if value == common.ANY else f"{value} {unit}",
                              disabled=len(options) < 2)
    return None if chosen == common.ANY else float(chosen)


def _constraints(shown: Shown) -> tuple[Constraints, float | None, float | None]:
    """(limits, most accuracy that may be lost as a share, price of an hour)."""
    st.markdown("**What must hold**")
    loss = _limit("Accuracy lost", "loss", ["0", "0.5", "1", "2", "3", "5", common.ANY], "points",
                  "Paired loss on the same questions as the unquantized engine, by the point estimate.")
    delta = _limit("ΔNLL at most", "delta", ["0.005", "0.01", "0.02", "0.03", "0.05", "0.1", common.ANY], "nats",
                   "The upper end of the 95 % interval counts.")
    tpot = _limit("TPOT at most", "tpot", common.steps([row.tpot_ms for row in shown.rows if row.tpot_ms]), "ms",
                  METRICS["tpot_ms"].formula)
    ttft = _limit("TTFT at most", "ttft", common.steps([row.ttft_ms for row in shown.rows if row.ttft_ms]), "ms",
                  METRICS["ttft_ms"].formula)
    memory = _limit("Fits in", "memory", common.steps([row.peak_memory_bytes / 1e9 for row in shown.rows
                                                 if row.peak_memory_bytes]), "GB", METRICS["peak_memory_bytes"].formula)
    titles = {METRICS[name].title: name for name in _PREFER}
    prefer = st.selectbox("Then prefer the best", list(titles), key="prefer", bind="query-params")
    passed = st.toggle("Only what passed its gate", value=True, key="passed", bind="query-params")
    price = st.number_input("Price of the device an hour", min_value=0.0, value=0.0, step=0.1, format="%.2f",
                            key="price", bind="query-params", help="In your currency; 0: not known. It gives the cost "
                            "of a million output tokens, as an axis and a column.")
    limits = Constraints.model_validate({
        "max_delta_nll": delta, "max_tpot_ms": tpot, "max_ttft_ms": ttft, "prefer": titles[prefer],
        "max_peak_memory_bytes": memory * 1e9 if memory else None, "passed_gate": passed})
    return limits, None if loss is None else loss / 100, price or None


def _pick_axes(table: pandas.DataFrame, price: float | None) -> tuple[axes.Axis, axes.Axis] | None:
    worth = axes.QUALITY | {"recovery": axes.RECOVERY}
    paid = axes.COST | {"energy": axes.ENERGY} | ({"price": axes.price_axis()} if price else {})
    quality = {axis.title: axis for axis in axes.usable(table, worth)}
    cost = {axis.title: axis for axis in axes.usable(table, paid)}
    if not quality or not cost:
        return None
    left, right = st.columns(2)
    y = left.selectbox("Quality", list(quality), key="quality", bind="query-params")
    x = right.selectbox("Cost", list(cost), key="cost", bind="query-params")
    return cost[x], quality[y]


def _chart(shown: Shown, table: pandas.DataFrame, decision: choice.Decision, price: float | None) -> str | None:
    """Draw the scatter; returns the engine digest that the reader clicked, if any."""
    picked = _pick_axes(table, price)
    if picked is None:
        st.info("This run has no engine with both a quality and a cost figure; the table below shows what it has.")
        return None
    x, y = picked
    figure = charts.tradeoff(table, x, y, choice.standings(shown.rows, x, y), common.palette(), shown.page.margin,
                             chosen=decision.engine)
    event: Any = common.chart(figure, "tradeoff", f"{y.title} against {x.title}, one point an engine; the table below "
                              "holds the same figures", on_select="rerun", selection_mode="points")
    ring = "The ring is the recommended engine. " if decision.engine else ""
    st.caption(f"{ring}Bars are 95 % intervals (quality) and the range of the repeats (time). The dotted line joins "
               "the engines that no other beats on both axes; paler ones are beaten beyond their intervals. Click a "
               "point for its verdict.")
    points = event["selection"]["points"] if event else []
    return str(points[0]["customdata"]) if points and points[0].get("customdata") else None


def _standing_axes(table: pandas.DataFrame) -> tuple[axes.Axis, axes.Axis] | None:
    """The axes that the chart shows, for the table's words."""
    titles = {axis.title: axis for axis in (*axes.QUALITY.values(), axes.RECOVERY, *axes.COST.values(),
                                            axes.ENERGY, axes.price_axis())}
    y, x = titles.get(st.session_state.get("quality", "")), titles.get(st.session_state.get("cost", ""))
    return (x, y) if x and y else None


def _table(shown: Shown, table: pandas.DataFrame, decision: choice.Decision) -> None:
    st.subheader("Engines", anchor=False)
    picked = _standing_axes(table)
    standing = choice.standings(shown.rows, *picked) if picked else {}
    held = table.copy()
    held["verdict"] = [f"{SIGNS[row.verdict]} {row.verdict}" if row.verdict else words.MISSING for row in shown.rows]
    for axis in (*axes.QUALITY.values(), *axes.COST.values(), axes.ENERGY):
        held[axis.key] = held[axis.key] * axis.scale
    held["interval"] = [words.nats_interval(row.delta_nll).partition(" ")[2] or words.MISSING for row in shown.rows]
    held["standing"] = [choice.STATES[standing[row.engine_digest].state] if row.engine_digest in standing
                        else words.MISSING for row in shown.rows]
    held["choice"] = ["recommended" if row.engine_digest == decision.engine else
                      decision.rejected.get(row.engine_digest, "meets every constraint") for row in shown.rows]
    columns = _columns(picked) | _paid(held)
    st.dataframe(held[list(columns)], column_config=columns, hide_index=True, key="engines", width="stretch",
                 alt="Engines with their figures")
    st.caption(" ".join(common.plain(line) for line in [*tables.caption(shown.rows), *_missing(held)]))
    path, run = shown.site.home.store, shown.run
    common.exports(run.id, lambda: tables.csv(shown.rows), lambda: _rendered(path, run.id, "md"),
                   lambda: _rendered(path, run.id, "html"))


def _rendered(path: Path, run: str, format: str) -> str:
    with RunStore(path) as store:
        return export.render(store, store.find_run(run), format)


def _columns(picked: tuple[axes.Axis, axes.Axis] | None) -> dict[str, Any]:
    number, text = st.column_config.NumberColumn, st.column_config.TextColumn
    against = f"{picked[1].title} against {picked[0].title}" if picked else "no axes"
    return {
        "engine": text("Engine", pinned=True), "verdict": text("Verdict"),
        "standing": text("Standing", help=f"Between the chart's axes: {against}."),
        "delta_nll": number("ΔNLL", help="nats per token against the unquantized model", format="%+.4f"),
        "interval": text("95 %", help="interval of ΔNLL, clustered by document"),
        "accuracy": number("Accuracy %", format="%.1f"),
        "flips": number("Flips %", help="answers that changed against the baseline", format="%.1f"),
        "same_top1": number("Top-1 %", help="tokens whose most probable next token is the same", format="%.1f"),
        "ttft_ms": number("TTFT ms", format="%.1f"), "tpot_ms": number("TPOT ms", format="%.2f"),
        "out_tok_s": number("Tokens/s", format="%.1f"), "size_bytes": number("Size MB", format="%.0f"),
        "peak_memory_bytes": number("Memory MB", format="%.0f"), "choice": text("Under the constraints")}


def _paid(held: pandas.DataFrame) -> dict[str, Any]:
    """Columns of energy and money, where they are known."""
    found = {axes.ENERGY.key: st.column_config.NumberColumn("J/token", help=axes.ENERGY.help, format="%.3f"),
             "price": st.column_config.NumberColumn("Cost of 1M", help=axes.price_axis().formula, format="%.2f")}
    return {key: column for key, column in found.items() if key in held and held[key].notna().any()}


def _missing(held: pandas.DataFrame) -> list[str]:
    """What an axis or column is not there for, and how it comes to be."""
    lines = []
    if not held[axes.ENERGY.key].notna().any():
        lines.append("Energy per token is not known: no sweep of this run read a GPU's energy counter.")
    if "price" not in held:
        lines.append("With a price of the device an hour, cost per million tokens becomes an axis.")
    return lines


def _verdicts(shown: Shown, selected: str | None) -> None:
    st.subheader("Verdicts", anchor=False)
    for row in shown.rows:
        if row.verdict is None:
            continue
        with st.expander(f"{common.badge(row.verdict)}  **{common.plain(label(row))}**  "
                         f"{common.plain(row.verdict_reason or '')}", expanded=row.engine_digest == selected):
            reasons = shown.page.reasons.get(row.engine_digest, ())
            if reasons:
                st.dataframe([{"check": reason.check, "verdict": f"{SIGNS[reason.word]} {reason.word}",
                               "found": reason.found, "allowed": reason.allowed} for reason in reasons],
                             hide_index=True, width="stretch")
            st.caption(f"engine `{row.engine_digest}`")
    if any(row.verdict not in (None, "BASELINE") for row in shown.rows):
        st.caption(words.WIDER)
