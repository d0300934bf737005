"""Layers: what each one costs in each format, and what giving some of them more bits would change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import streamlit as st

from toolkit import layers
from toolkit.layers import Sensitivity
from toolkit.report import plots, words
from ui import common
from ui.common import Site

_PRESELECTED = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """A format, the layers left in 16 bits, and those raised to eight."""

    format: str
    kept: list[int]
    raised: list[int]


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
        choice = _choose(sensitivity)
    with left:
        _map(sensitivity, choice)
    with right:
        _predicted(here, sensitivity, choice)
    _table(sensitivity)


def _choose(sensitivity: Sensitivity) -> Choice:
    format = st.segmented_control("Format", sensitivity.formats, default=sensitivity.formats[0], key="format",
                                  bind="query-params", required=True) or sensitivity.formats[0]
    can_raise = layers.can_raise(format)
    raised = _layers_of(sensitivity, "raised", "Layers raised to 8 bits") if can_raise else []
    kept = _layers_of(sensitivity, "kept", "Layers left in 16 bits")
    worst = layers.advice(sensitivity, format, _PRESELECTED)
    if worst:
        st.caption(f"The most sensitive in {format}: {', '.join(f'layer {layer}' for layer in worst)}.")
        with st.container(horizontal=True, gap="small"):
            if can_raise:
                _advise(f"Raise these {len(worst)} to 8 bits", "raised", worst, set(worst) <= {*kept, *raised})
            _advise(f"Leave these {len(worst)} in 16 bits", "kept", worst, set(worst) <= set(kept))
    return Choice(format, kept, [layer for layer in raised if layer not in kept])


def _layers_of(sensitivity: Sensitivity, key: str, name: str) -> list[int]:
    return st.multiselect(name, sensitivity.layers, key=key, bind="query-params", on_change=_alone, args=(key,),
                          format_func=lambda layer: f"layer {layer}", placeholder="None; click the map or choose here")


def _advise(name: str, key: str, worst: list[int], taken: bool) -> None:
    st.button(name, key="advice" if key == "kept" else "raise", type="tertiary", icon=":material/arrow_upward:",
              disabled=taken, on_click=_take, args=(key, worst))


def _take(key: str, more: list[int]) -> None:
    st.session_state[key] = sorted({*st.session_state.get(key, []), *more})
    _alone(key)


def _alone(key: str) -> None:
    """A layer has one format: what was chosen here is taken out of the other list."""
    other = {"kept": "raised", "raised": "kept"}[key]
    chosen = set(st.session_state.get(key, []))
    if chosen & set(st.session_state.get(other, [])):
        st.session_state[other] = [layer for layer in st.session_state[other] if layer not in chosen]


def _clicked(event: Any, can_raise: bool) -> None:
    """A click on a layer gives it more bits: eight where the recipe can, then 16, then none of its own again."""
    points = event.get("selection", {}).get("points", []) if event else []
    for point in points:
        try:
            layer = int(str(point["y"]).removeprefix("layer "))
        except (KeyError, ValueError):
            continue
        kept, raised = (set(st.session_state.get(key, [])) for key in ("kept", "raised"))
        if layer in kept:
            st.session_state["kept"] = sorted(kept - {layer})
        else:
            _take("raised" if can_raise and layer not in raised else "kept", [layer])


def _map(sensitivity: Sensitivity, choice: Choice) -> None:
    measured = [name for name in layers.MEASURES if any(getattr(cost, name) is not None for cost in sensitivity.costs)]
    titles = {layers.MEASURES[name]: name for name in measured}
    title = st.segmented_control("Show", list(titles), default=next(iter(titles)), key="show", bind="query-params",
                                 required=True) or next(iter(titles))
    kept, raised = ([(f"layer {layer}", choice.format) for layer in chosen] for chosen in (choice.kept, choice.raised))
    figure = plots.heat_map([f"layer {layer}" for layer in sensitivity.layers], sensitivity.formats,
                            layers.matrix(sensitivity, titles[title]), title, common.palette(), kept, raised)
    can_raise = layers.can_raise(choice.format)
    common.chart(figure, "heat", f"{title} of every layer in every format; the table below holds the same figures",
                 on_select=lambda: _clicked(st.session_state.get("heat"), can_raise), selection_mode="points")
    if choice.kept or choice.raised:
        st.caption("○ left in 16 bits" + (" · △ raised to 8 bits" if can_raise else ""))


def _predicted(here: Site, sensitivity: Sensitivity, choice: Choice) -> None:
    format, more = choice.format, [*choice.kept, *choice.raised]
    found = layers.predict(sensitivity, format, choice.kept, choice.raised)
    st.markdown("**Predicted**")
    first, second = st.columns(2)
    first.metric("Loss, nats/token", words.nats(found.loss), None if not more else
                 f"{words.nats(found.loss_all)} with none", delta_color="off", delta_arrow="off")
    second.metric("Size of the layers", words.size(found.size), None if not more else
                  f"+{words.percent(found.share_kept)}", delta_color="off", delta_arrow="off")
    tpot = _tpot(here, sensitivity, format, found)
    if tpot is not None:
        st.metric("TPOT", f"{words.milliseconds(tpot)} ms", "between the measured engines, by bytes",
                  delta_color="off", delta_arrow="off")
    st.caption("Losses of single layers are added up; judge the built engine before you believe the sum."
               + (f" A raised layer counts as it was measured in {layers.RAISED}; its activations stay in 16 bits, "
                  "so it should lose less." if choice.raised and found.loss is not None else "")
               + (f" What {layers.RAISED} costs was not measured." if choice.raised and found.loss is None else ""))
    if (floor := layers.noise(sensitivity, format)) > 0:
        st.caption(f"Some layer, quantized, gains {floor:.4f}, so differences below that are noise: measure on more "
                   "text (--rows) before you choose by them.")
    _recipe(sensitivity, choice)


def _recipe(sensitivity: Sensitivity, choice: Choice) -> None:
    format, kept, raised = choice.format, choice.kept, choice.raised
    if len(kept) == len(sensitivity.layers):
        st.info("Every layer is left in 16 bits: that is the recipe bf16.")
        return
    if raised and len(kept) + len(raised) == len(sensitivity.layers):
        st.info(f"No layer is left in {format}: that is the recipe int8_weight_only"
                + (", with those layers on its keep." if kept else "."))
        return
    if not kept and not raised:
        st.info(f"No layer has more bits: that is the recipe {format}.")
        st.code(f"toolkit quantize {sensitivity.model} --recipe {format} --out {format}", language=None,
                wrap_lines=True)
        return
    text, name = layers.recipe_text(format, kept, raised), layers.recipe_name(format, kept, raised)
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
