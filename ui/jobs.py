"""Long work: start it from a form, watch it, cancel it.

Each job is a process of its own with a row in the store, so reloading, a second tab or a new server changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import streamlit as st

from calib.choices import KV_CHOICES
from calib.errors import ToolkitError
from calib.recipe import ordinary_recipes
from toolkit import jobs
from toolkit.console import duration
from toolkit.jobs import JobTable, Work
from toolkit.report import words
from ui import common
from ui.common import Site

PER_PAGE = 25
_COLORS = {"running": "blue", "waiting": "gray", "finished": "green", "failed": "red", "killed": "red",
           "cancelled": "yellow"}
#: Pixels of the job table's columns.
_WIDTHS = {"state": 85, "what": 440, "took": 85, "exit": 40, "stage": 100, "asked": 130, "job": 140}
_SIGNS = {"running": "●", "waiting": "○", "finished": "✓", "failed": "✕", "killed": "✕", "cancelled": "–"}
_LOG_TAIL = 6000


def page() -> None:
    here = common.site()
    st.title("Jobs", anchor=False)
    st.caption("Each job is a process of its own: closing or reloading this page, or restarting its server, does not "
               "touch it. Jobs that are started here run one after the other, so that no measurement is disturbed.")
    _start(here)
    _going(here)
    _past(here)


def _start(here: Site) -> None:
    if common.refuse_read_only(here):
        return
    notice = st.container(key="notice")  # not in the part below, which folds away once there are jobs
    forms: dict[str, Callable[[Site], list[str] | None]] = {
        "Whole pipeline": _run_form, "Quantize": _quantize_form, "Build": _build_form, "Evaluate": _eval_form,
        "Sweep": _sweep_form, "Layers": _layers_form}
    verbs = {"Whole pipeline": "run", "Quantize": "quantize", "Build": "build", "Evaluate": "eval", "Sweep": "sweep",
             "Layers": "sensitivity"}
    with st.expander("Start a job", expanded=not _any(here)):
        kind = st.segmented_control("What", list(forms), default="Whole pipeline", key="kind", bind="query-params",
                                    required=True) or "Whole pipeline"
        with st.form(f"start-{verbs[kind]}", border=False):
            arguments = forms[kind](here)
            offline = st.checkbox("Never touch the network", key=f"offline-{verbs[kind]}")
            pressed = st.form_submit_button("Start", type="primary")
        if pressed:
            with notice:
                _begin(here, verbs[kind], arguments, offline)


def _any(here: Site) -> bool:
    with JobTable(here.home.store) as table:
        return table.count() > 0


def _begin(here: Site, verb: str, arguments: list[str] | None, offline: bool) -> None:
    if arguments is None:
        st.warning("Fill in the fields first.")
        return
    try:
        job = jobs.start(here.home, verb, arguments, offline)
        st.success(f"Job {job} was started.")
    except ToolkitError as error:
        st.error(common.plain(f"{error.message}. {error.hint}"))


def _models(here: Site) -> list[str]:
    return sorted(path.name for path in here.home.models.glob("*") if (path / "config.json").is_file())


def _refs(here: Site, *kinds: str) -> dict[str, str]:
    """Name -> folder of what this home has made, the newest first."""
    with here.store() as store:
        return {f"{path.name} ({kind})": str(path) for kind in kinds for path in store.artifacts(kind, 40)
                if path.is_dir()}


def _run_form(here: Site) -> list[str] | None:
    path = st.text_input("Job file", placeholder="examples/demo.yaml", key="job-file",
                         help="A path on this machine. The run goes on where it was stopped.")
    return [str(Path(path).expanduser().absolute())] if path and path.strip() else None


def _model_field(here: Site, verb: str) -> str:
    return str(st.selectbox("Model", _models(here), key=f"model-{verb}", accept_new_options=True, index=0 if
                            _models(here) else None, help="A model of this home, a folder, or a hub name.") or "")


def _quantize_form(here: Site) -> list[str] | None:
    model = _model_field(here, "quantize")
    left, right = st.columns(2)
    recipe = left.selectbox("Recipe", list(ordinary_recipes()), key="recipe-quantize")
    cache = right.selectbox("KV cache", list(KV_CHOICES), key="kv-quantize")
    left, right = st.columns(2)
    rows = left.number_input("Calibration rows", 1, 4096, 16, key="rows-quantize")
    length = right.number_input("Tokens a row", 8, 8192, 256, key="length-quantize")
    out = here.home.path / "checkpoints" / f"{model.rsplit('/', 1)[-1]}-{recipe}-{cache}-{int(time.time()):x}"
    if not model:
        return None
    return [model, "--recipe", recipe, "--kv-cache", cache, "--rows", str(rows), "--length", str(length), "--out",
            str(out)]


def _ref_field(here: Site, verb: str, *kinds: str) -> str:
    known = _refs(here, *kinds)
    models = {name: name for name in _models(here)}
    chosen = st.selectbox("Engine, checkpoint or model" if verb != "build" else "Checkpoint or model",
                          [*known, *models], key=f"ref-{verb}", accept_new_options=True,
                          index=0 if known or models else None)
    return (known | models).get(chosen or "", chosen or "")


def _build_form(here: Site) -> list[str] | None:
    ref = _ref_field(here, "build", "quantized-checkpoint")
    first, second, third = st.columns(3)
    length = first.number_input("Tokens of a sequence", 16, 1 << 20, 1024, key="length-build")
    batch = second.number_input("Sequences in a step", 1, 4096, 8, key="batch-build")
    tune = third.selectbox("Tuning", ["quick", "full", "none"], key="tune-build")
    if not ref:
        return None
    out = here.home.path / "engines" / f"{Path(ref).name}-{int(time.time()):x}"
    return [ref, "--max-seq-len", str(length), "--max-batch-size", str(batch), "--tune", tune, "--out", str(out)]


def _eval_form(here: Site) -> list[str] | None:
    ref = _ref_field(here, "eval", "engine", "quantized-checkpoint")
    first, second, third = st.columns(3)
    baseline = first.selectbox("Compare with", ["", *_models(here)], key="baseline-eval",
                               help="The unquantized model; without one there is no ΔNLL, KL or flip.")
    texts = second.number_input("Texts", 1, 100_000, 64, key="texts-eval")
    items = third.number_input("Questions of each task", 1, 100_000, 100, key="items-eval")
    if not ref:
        return None
    return [ref, "--texts", str(texts), "--items", str(items), *(["--baseline", baseline] if baseline else [])]


def _sweep_form(here: Site) -> list[str] | None:
    ref = _ref_field(here, "sweep", "engine", "quantized-checkpoint")
    left, right = st.columns([3, 1])
    cells = left.text_input("Cells", "1x32x24,8x32x24", key="cells-sweep", help="batch x input x output tokens")
    repeats = right.number_input("Repeats", 1, 100, 3, key="repeats-sweep")
    return [ref, "--cells", cells, "--repeats", str(repeats)] if ref and cells else None


def _layers_form(here: Site) -> list[str] | None:
    model = _model_field(here, "sensitivity")
    rows = st.number_input("Rows of text", 1, 1024, 2, key="rows-sensitivity")
    return [model, "--rows", str(rows)] if model else None


@st.fragment(run_every=1.5)
def _going(here: Site) -> None:
    """What goes on now, with progress and ETA. Polls the table; the work does not know that it is watched."""
    with JobTable(here.home.store) as table:
        found = [work for work in table.list(40) if not work.over]
    for work in found:
        with st.container(border=True, key=f"job-{work.id}"):
            left, right = st.columns([5, 1], vertical_alignment="center")
            left.markdown(f"{_state(work)}  {common.plain(_title(work))}")
            if not here.read_only:
                _cancel(here, work, right)
            st.progress(work.share or 0.0, text=common.plain(_progress(work)))
            with st.expander("Log", key=f"log-{work.id}"):
                st.code(_log(here, work) or "It has said nothing yet.", language=None)


def _cancel(here: Site, work: Work, place: st.delta_generator.DeltaGenerator) -> None:
    """First asks, as Ctrl-C does; pressed again it ends the process."""
    word = "End it now" if work.cancel else "Cancel"
    if place.button(word, key=f"cancel-{work.id}", width="stretch"):
        try:
            with JobTable(here.home.store) as table:
                table.cancel(work.id, force=work.cancel is not None)
        except ToolkitError as error:
            st.warning(common.plain(error.message))
        st.rerun(scope="fragment")


def _state(work: Work) -> str:
    word = "stopping" if work.cancel and not work.over else work.state
    return f":{_COLORS.get(word, 'yellow')}-badge[{_SIGNS.get(word, '…')} {word}]"


def _title(work: Work) -> str:
    shown = [Path(word).name if "/" in word and Path(word).is_absolute() else word for word in work.arguments]
    return " ".join([work.verb, *shown])


def _progress(work: Work) -> str:
    if work.state == "waiting":
        return "waits for the job before it"
    share = f"{100 * work.share:.0f} %" if work.share is not None else ""
    left = f"about {duration(work.eta_s)} left in this stage" if work.eta_s is not None else ""
    return " · ".join(part for part in (work.stage or "starting", share, left) if part)


def _log(here: Site, work: Work) -> str:
    path = jobs.log_of(here.home, work.id)
    if not path.is_file():
        return "" if work.own else "This job was started in a terminal, which shows what it says."
    text = path.read_text(encoding="utf-8", errors="replace")
    return text[-_LOG_TAIL:].strip()


def _past(here: Site) -> None:
    with JobTable(here.home.store) as table:
        total = table.count()
        pages = max(1, -(-total // PER_PAGE))
        st.subheader("All jobs", anchor=False)
        if not total:
            st.write("No job yet. Start one above, or in a terminal: long work of the command line is listed here too.")
            st.code(f"toolkit run examples/demo.yaml --home {here.home.path}", language=None)
            return
        number = st.number_input(f"Page of {pages}", 1, pages, 1, key="page", bind="query-params") if pages > 1 else 1
        found = table.list(PER_PAGE, (number - 1) * PER_PAGE)
    lines = [{"state": f"{_SIGNS[work.state]} {work.state}", "what": _title(work), "took": _took(work),
              "exit": words.MISSING if work.exit_code is None else str(work.exit_code), "stage": work.stage,
              "asked": work.asked[:16].replace("T", " "), "job": work.id} for work in found]
    event = st.dataframe(lines, hide_index=True, width="stretch", key="all-jobs", height="content", on_select="rerun",
                         column_config={name: st.column_config.TextColumn(width=width)  # or the rest is cut off
                                        for name, width in _WIDTHS.items()},
                         selection_mode="single-row")
    chosen = [found[row] for row in event["selection"]["rows"] if row < len(found)]
    name = chosen[0].id if chosen else None
    if name is None:
        st.caption("Select a line to read its log.")
        return
    st.caption(f"Log of {name}")
    st.code(_log(here, chosen[0]) or "It said nothing.", language=None)


def _took(work: Work) -> str:
    if not work.began or not work.ended:
        return words.MISSING
    return duration((datetime.fromisoformat(work.ended) - datetime.fromisoformat(work.began)).total_seconds())
