"""The dashboard's entry: parse where home is, pick the run, draw the page."""

from __future__ import annotations

import argparse
from pathlib import Path

import streamlit as st

from toolkit.home import Home
from ui import tradeoff

#: Drawn here, because Streamlit's named icons and emoji are fetched from elsewhere.
ICON = ("<svg viewBox='0 0 32 32'><path d='M4 27V5M4 27h24' stroke='#5b6675' stroke-width='3' fill='none'/>"
        "<circle cx='11' cy='11' r='4' fill='#c65102'/><circle cx='22' cy='20' r='4' fill='#0b6aa2'/></svg>")


def home_of(arguments: list[str] | None = None) -> Home:
    """The home folder that ``python -m ui`` was given."""
    parser = argparse.ArgumentParser(prog="ui")
    parser.add_argument("--home", type=Path, required=True)
    return Home(parser.parse_args(arguments).home)


def main() -> None:
    st.set_page_config(page_title="Precision and latency", page_icon=ICON, layout="wide",
                       initial_sidebar_state="collapsed")
    st.html(Path(__file__).with_name("page.css"))
    tradeoff.page(home_of())


main()
