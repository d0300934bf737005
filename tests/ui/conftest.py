"""Homes that pages are tested on: figures only, and the tiny real model taken through the whole pipeline."""

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import ui

APP = Path(ui.__file__).parent / "app.py"


@pytest.fixture
def open_page(monkeypatch):
    """``open_page(home, "accuracy", engine="int8")``: the page alone, with those query parameters."""
    def run(home, name="tradeoffs", read_only=False, **query):
        monkeypatch.setattr("sys.argv", ["app.py", "--home", str(home.path), *(["--read-only"] if read_only else [])])
        page = AppTest.from_string(f"from ui import {name}\n{name}.page()\n", default_timeout=60)
        for key, value in query.items():
            page.query_params[key] = value
        return page.run()
    return run


@pytest.fixture(scope="session")
def judged_home(tmp_path_factory):
    """A home in which the tiny model was calibrated, built, judged and measured for real: two engines pass."""
    import sys

    sys.path.insert(0, str(Path(__file__).parent.parent / "toolkit"))
    try:
        import conftest as tiny  # the toolkit room's tiny model and data
    finally:
        sys.path.pop(0)
    from toolkit import pipeline
    from toolkit.home import Home
    from toolkit.job import load_job
    from toolkit.stages import Workshop
    from toolkit.store import RunStore

    home = Home(tmp_path_factory.mktemp("judged") / "home")
    tiny.write_model(home.models / "tiny")
    tiny.write_data(home)
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.yaml").write_text(tiny.JOB)
    (folder / "policy.yaml").write_text(tiny.POLICY)
    with RunStore(home.store) as store:
        pipeline.run(Workshop(home, store, offline=True), load_job(folder / "job.yaml"), folder)
    return home


def shown_text(page):
    """All plain text of a page."""
    kinds = (page.markdown, page.caption, page.code, page.title, page.subheader, page.info, page.warning, page.error,
             page.success)
    return " ".join(str(element.value) for kind in kinds for element in kind)
