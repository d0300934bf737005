"""The dashboard's entry: the pages, their order, and what all of them share."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from ui import accuracy, compare, engine, jobs, latency, layers, releases, tradeoffs

#: Drawn here, because Streamlit's named icons and emoji are fetched from elsewhere.
ICON = ("<svg viewBox='0 0 32 32'><path d='M4 27V5M4 27h24' stroke='#5b6675' stroke-width='3' fill='none'/>"
        "<circle cx='11' cy='11' r='4' fill='#c65102'/><circle cx='22' cy='20' r='4' fill='#0b6aa2'/></svg>")


def main() -> None:
    st.set_page_config(page_title="Precision and latency", page_icon=ICON, layout="wide",
                       initial_sidebar_state="collapsed")
    st.html(Path(__file__).with_name("page.css"))
    pages = [st.Page(tradeoffs.page, title="Tradeoffs", url_path="tradeoffs", default=True),
             st.Page(accuracy.page, title="Accuracy", url_path="accuracy"),
             st.Page(latency.page, title="Latency", url_path="latency"),
             st.Page(engine.page, title="Engine", url_path="engine"),
             st.Page(layers.page, title="Layers", url_path="layers"),
             st.Page(compare.page, title="Compare", url_path="compare"),
             st.Page(jobs.page, title="Jobs", url_path="jobs"),
             st.Page(releases.page, title="Releases", url_path="releases")]
    st.navigation(pages, position="top").run()


main()
