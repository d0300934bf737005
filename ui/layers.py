"""Layers: what each one costs in each format, and what leaving some in 16 bits would change."""

from __future__ import annotations

from typing import Any

import streamlit as st

from toolkit import layers
from toolkit.layers import Sensitivity
from toolkit.report import plots, words
from ui import common
from ui.common import Site

_PRESELECTED = 3


def page() -> None:
    here = common.site()
    st.title("Layers", anchor=False)
    found, faults = layers.sensitivities(here.home)
    for fault in faults:
        st.warning(common.plain(fault))
    if not found:
        common.empty("No layer has been measured yet", "A sensitivity measurement quantizes one layer at a time and "
                     "says what that costs; a small model takes a few minutes.",
                     f"toolkit sensitivity MODEL --home {here.home.path}")
        return
    names = {f"{one.model} · {one.model_digest[:8]}": one for one in found}
    place, _ = st.columns([1, 1])
    sensitivity = names[place.selectbox("Model", list(names), key="model", bind="query-params")]
    st.caption(f"Measured {sensitivity.created[:10]}: {len(sensitivity.layers)} layers, "
               f"{', '.join(sensitivity.formats)}.")
    left, right = st.columns([3, 2], gap="large")
    with right:
        format, kept = _choose(sensitivity)
    with left:
        _map(sensitivity, format, kept)
    with right:
        _predicted(here, sensitivity, format, kept)
    _table(sensitivity)


def _choose(sensitivity: Sensitivity) -> tuple[str, list[int]]:
    format = st.segmented_control("Format", sensitivity.formats, default=sensitivity.formats[0], key="format",
                                  bind="query-params", required=True) or sensitivity.formats[0]
    kept = st.multiselect("Layers left in 16 bits", sensitivity.layers, key="kept", bind="query-params",
                          format_func=lambda layer: f"layer {layer}",
                          placeholder="None; click the map or choose here")
    worst = layers.advice(sensitivity, format, _PRESELECTED)
    if worst:
        st.caption(f"The most sensitive in {format}: {', '.join(f'layer {layer}' for layer in worst)}.")
        st.button(f"Leave these {len(worst)} in 16 bits", key="advice", type="tertiary", icon=":material/arrow_upward:",
                  disabled=set(worst) <= set(kept), on_click=_keep, args=(sorted({*kept, *worst}),))
    return format, kept


def _keep(kept: list[int]) -> None:
    st.session_state["kept"] = kept


def _clicked(event: Any) -> None:
    """A click on a layer puts it into the choice, or takes it out."""
    points = event.get("selection", {}).get("points", []) if event else []
    for point in points:
        try:
            layer = int(str(point["y"]).removeprefix("layer "))
        except (KeyError, ValueError):
            continue
        kept = set(st.session_state.get("kept", []))
        st.session_state["kept"] = sorted(kept ^ {layer})


def _map(sensitivity: Sensitivity, format: str, kept: list[int]) -> None:
    measured = [name for name in layers.MEASURES if any(getattr(cost, name) is not None for cost in sensitivity.costs)]
    titles = {layers.MEASURES[name]: name for name in measured}
    title = st.segmented_control("Show", list(titles), default=next(iter(titles)), key="show", bind="query-params",
                                 required=True) or next(iter(titles))
    figure = plots.heat_map([f"layer {layer}" for layer in sensitivity.layers], sensitivity.formats,
                            layers.matrix(sensitivity, titles[title]), title, common.palette(),
                            [(f"layer {layer}", format) for layer in kept])
    common.chart(figure, "heat", f"{title} of every layer in every format; the table below holds the same figures",
                 on_select=lambda: _clicked(st.session_state.get("heat")), selection_mode="points")


def _predicted(here: Site, sensitivity: Sensitivity, format: str, kept: list[int]) -> None:
    found = layers.predict(sensitivity, format, kept)
    st.markdown("**Predicted**")
    first, second = st.columns(2)
    first.metric("Loss, nats/token", words.nats(found.loss), None if not kept else
                 f"{words.nats(found.loss_all)} with none", delta_color="off", delta_arrow="off")
    second.metric("Size of the layers", words.size(found.size), None if not kept else
                  f"+{words.percent(found.share_kept)}", delta_color="off", delta_arrow="off")
    tpot = _tpot(here, sensitivity, format, found)
    if tpot is not None:
        st.metric("TPOT", f"{words.milliseconds(tpot)} ms", "between the measured engines, by bytes",
                  delta_color="off", delta_arrow="off")
    st.caption("Losses of single layers are added up; judge the built engine before you believe the sum.")
    if (floor := layers.noise(sensitivity, format)) > 0:
        st.caption(f"Some layer, quantized, gains {floor:.4f}, so differences below that are noise: measure on more "
                   "text (--rows) before you choose by them.")
    if len(kept) == len(sensitivity.layers):
        st.info("Every layer is left in 16 bits: that is the recipe bf16.")
        return
    if not kept:
        st.info(f"Nothing is left in 16 bits: that is the recipe {format}.")
        st.code(f"toolkit quantize {sensitivity.model} --recipe {format} --out {format}", language=None,
                wrap_lines=True)
        return
    text, name = layers.recipe_text(format, kept), layers.recipe_name(format, kept)
    st.markdown("**The exact recipe**")
    st.code(text, language="yaml", wrap_lines=True)
    st.code(f"toolkit quantize {sensitivity.model} --recipe {name}.yaml --out {name}", language=None, wrap_lines=True)
    st.download_button("Recipe", text, file_name=f"{name}.yaml", mime="application/yaml", key="recipe",
                       icon=":material/download:", type="primary", on_click="ignore")


def _tpot(here: Site, sensitivity: Sensitivity, format: str, found: layers.Prediction) -> float | None:
    """From the newest run on this model that measured both engines; None where there is none."""
    with here.store() as store:
        for run in store.runs(20, finished=True):
            if run.facts.get("model_digest") == sensitivity.model_digest:
                times = {stored.row.recipe: stored.row.tpot_ms for stored in store.rows(run.id)
                         if stored.row.kv_cache == "bf16"}
                quantized, full = times.get(format), times.get("bf16")
                if quantized is not None and full is not None:
                    return layers.predicted_tpot(found, sensitivity, quantized, full)
    return None


def _table(sensitivity: Sensitivity) -> None:
    with st.expander("All measurements"):
        lines = [dict(line) for line in layers.lines(sensitivity)]
        st.dataframe(lines, hide_index=True, width="stretch", key="costs")
        common.frame_exports("layers", lines)
