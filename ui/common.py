"""What every page shares: where home is, the run that is looked at, colours, plain text, exports, empty states.

A page is widgets only; every number comes from ``toolkit``. Each choice is a widget bound to the URL, so a view can be
sent or bookmarked. Caches are bounded and keyed by what they were made from.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import streamlit as st

from evals.report import Row
from evals.tradeoff import label
from toolkit.errors import NoRunError, UsageError
from toolkit.home import Home
from toolkit.report import export, tables
from toolkit.report.html import Page
from toolkit.report.style import DARK, LIGHT, SIGNS, Palette, marker_svg
from toolkit.store import Run, RunStore

BADGES = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow", "ANOMALOUS": "violet", "BASELINE": "gray"}
#: The last place of a limit's slider: no limit.
ANY = "any"
_NICE = (1.0, 2.0, 3.0, 5.0)
#: Runs that the picker lists at once; older ones are found by words.
LISTED = 60
#: plotly's toolbar with one button: save as PNG.
CHART = {"displayModeBar": True, "displaylogo": False, "modeBarButtons": [["toImage"]],
         "toImageButtonOptions": {"format": "png", "scale": 2, "filename": "chart"}}


@dataclass(frozen=True, slots=True)
class Site:
    """The home that is shown, and whether pages may start or release anything."""

    home: Home
    read_only: bool

    def store(self) -> RunStore:
        return RunStore(self.home.store)


def site(arguments: list[str] | None = None) -> Site:
    """What ``python -m ui`` was given."""
    parser = argparse.ArgumentParser(prog="ui")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--read-only", action="store_true")
    found = parser.parse_args(arguments)
    return Site(Home(found.home), found.read_only)


def palette() -> Palette:
    return DARK if st.context.theme.type == "dark" else LIGHT


def plain(text: str) -> str:
    """Text that Streamlit's Markdown shows as it is: no directives, emoji codes, formulas or HTML."""
    escaped = tables.escape_markdown(text)
    for character in "$:~":
        escaped = escaped.replace(character, f"\\{character}")
    return escaped


def badge(word: str) -> str:
    return f":{BADGES[word]}-badge[{SIGNS[word]} {word}]"


def chart(figure: Any, key: str, alt: str, **settings: Any) -> Any:
    """A figure in our own colours, with its description for readers who do not see it."""
    return st.plotly_chart(figure, theme=None, key=key, config=CHART, alt=alt, **settings)


def legend(rows: Sequence[Row], others: Sequence[str] = ()) -> None:
    """Names beside their markers, once for several charts."""
    colors = palette()
    parts = [(marker_svg(row.recipe, row.kv_cache, colors.of(row.recipe, number)), label(row))
             for number, row in enumerate(rows)]
    parts += [(marker_svg("", "open", colors.other[number % len(colors.other)]), name)
              for number, name in enumerate(others)]
    st.html("<div class=legend>" + "".join(
        f'<span><img alt="" width=13 height=13 src="data:image/svg+xml,{quote(mark)}">{escape(name)}</span>'
        for mark, name in parts) + "</div>")


def empty(title: str, text: str, *commands: str) -> None:
    """Nothing to show yet, and what to run so that there is."""
    st.subheader(title, anchor=False)
    st.write(text)
    if commands:
        st.code("\n".join(commands), language=None)


@dataclass(frozen=True, slots=True)
class Shown:
    """The run that a page looks at, with its rows and words."""

    site: Site
    run: Run
    page: Page

    @property
    def rows(self) -> Sequence[Row]:
        return self.page.rows

    @property
    def baseline(self) -> Row | None:
        return next((row for row in self.rows if row.verdict == "BASELINE"), None)


def run_page(title: str) -> Shown | None:
    """Heading, run picker and what the run is; None after an empty state when there is no run to look at."""
    here = site()
    left, right = st.columns([3, 2], vertical_alignment="bottom")
    left.title(title, anchor=False)
    with here.store() as store:
        total = store.count_runs(finished=True)
        run = _pick_run(store, right, total) if total else None
    if run is None:
        _no_run(here, total)
        return None
    shown = Shown(here, run, load(str(here.home.store), run.id, run.finished or ""))
    facts = [run.job, str(run.facts.get("model", "")), str(run.facts.get("device", "")),
             f"finished {(run.finished or '')[:16].replace('T', ' ')} UTC"]
    st.caption(plain(" · ".join(fact for fact in facts if fact)))
    return shown


def _pick_run(store: RunStore, place: Any, total: int) -> Run | None:
    words = ""
    if total > LISTED:
        words = place.text_input("Find a run", key="find", bind="query-params", persist_state="session",
                                 placeholder=f"Part of a job, model or id ({total:,} runs)") or ""
    runs = {run.id: run for run in store.runs(LISTED, search=words, finished=True)}  # newest first
    if words and not runs:
        place.caption("No run matches; a part of a job's name, a model's name or a run's id is enough.")
    asked = st.session_state.get("run") or st.query_params.get("run")
    if asked and asked not in runs:
        with contextlib.suppress(UsageError, NoRunError):  # a stale link: the newest run is shown instead
            found = store.find_run(str(asked))
            runs |= {found.id: found} if found.finished else {}
    if not runs:
        return None
    return runs[place.selectbox("Run", list(runs), key="run", bind="query-params")]


def _no_run(here: Site, total: int) -> None:
    if total:  # words that match nothing, and no run chosen before
        return
    empty("No finished run yet", "A run calibrates a model, builds engines, judges them and measures their speed. The "
          "demo takes about ten minutes on two cores; this page shows it as soon as it is finished.",
          f"toolkit data prepare --home {here.home.path}", f"toolkit run examples/demo.yaml --home {here.home.path}")


@st.cache_data(max_entries=32, show_spinner=False)
def load(path: str, run: str, finished: str) -> Page:
    """The view of a run; ``finished`` is part of the key, so that a run done again is read again."""
    with RunStore(Path(path)) as store:
        return export.page_of(store, store.find_run(run))


def pick_engine(shown: Shown, key: str = "engine", skip_baseline: bool = False) -> Row:
    """One engine of the run, by its name."""
    names = {label(row): row for row in shown.rows if not (skip_baseline and row.verdict == "BASELINE")}
    names = names or {label(row): row for row in shown.rows}
    place, _ = st.columns([1, 2])
    return names[place.selectbox("Engine", list(names), key=key, bind="query-params")]


def steps(values: list[float]) -> list[str]:
    """Round limits around the run's own figures: 1, 2, 3, 5 and their decades; the last is no limit."""
    if not values:
        return [ANY]
    found, low, high = [], min(values) / 2, max(values) * 1.5
    exponent = -6
    while 10.0**exponent <= high:
        found += [step * 10.0**exponent for step in _NICE if low <= step * 10.0**exponent <= high]
        exponent += 1
    return [f"{value:g}" for value in found] + [ANY]


def exports(name: str, csv: Callable[[], str] | None = None, markdown: Callable[[], str] | None = None,
            html: Callable[[], str] | None = None) -> None:
    """Downloads of what the page shows, made when they are asked for. Charts save themselves as PNG."""
    with st.container(key=f"exports-{name}", horizontal=True, gap="small"):
        for kind, made, mime in (("CSV", csv, "text/csv"), ("Markdown", markdown, "text/markdown"),
                                 ("HTML", html, "text/html")):
            if made is not None:
                ending = {"Markdown": "md"}.get(kind, kind.lower())
                st.download_button(kind, made, file_name=f"{name}.{ending}", mime=mime, key=f"export-{name}-{ending}",
                                   icon=":material/download:", type="tertiary", on_click="ignore")


def frame_exports(name: str, lines: Sequence[dict[str, Any]]) -> None:
    """CSV, Markdown and HTML of a plain table."""
    exports(name, lambda: export.lines_as(lines, "csv"), lambda: export.lines_as(lines, "md"),
            lambda: export.lines_as(lines, "html", name))


def refuse_read_only(here: Site) -> bool:
    """Says so and returns True where nothing may be changed from here."""
    if here.read_only:
        st.info("This dashboard is read-only: it was started with --read-only.")
    return here.read_only
