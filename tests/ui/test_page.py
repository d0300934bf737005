"""The page through AppTest: it draws what the store holds, the URL decides what is shown, empty says what to run."""

import tomllib
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import ui
from toolkit.home import Home
from toolkit.report.style import DARK, LIGHT
from toolkit.store import RunStore, StoredRow
from ui.__main__ import flags

APP = Path(ui.__file__).parent / "app.py"


@pytest.fixture
def open_page(monkeypatch):
    def run(home, **query):
        monkeypatch.setattr("sys.argv", ["app.py", "--home", str(home.path)])
        page = AppTest.from_file(str(APP), default_timeout=60)
        for name, value in query.items():
            page.query_params[name] = value
        return page.run()
    return run


def shown_text(page):
    return " ".join(str(element.value) for kind in (page.markdown, page.caption, page.code, page.title, page.subheader)
                    for element in kind)


def test_a_finished_run_is_shown(open_page, stored_home):
    page = open_page(stored_home)
    assert not page.exception
    table = page.dataframe[0].value
    assert list(table["engine"]) == ["bf16", "fp8", "int8", "int4_awq", "int8 kv=fp8"]
    assert list(table["verdict"]) == ["○ BASELINE", "✓ PASS", "✓ PASS", "✕ FAIL", "? INCONCLUSIVE"]
    assert table["delta_nll"][2] == pytest.approx(0.0144)
    assert table["accuracy"][2] == pytest.approx(36.9)
    assert table["size_bytes"][2] == pytest.approx(164)
    labels = [expander.label for expander in page.expander]
    assert any("PASS" in label and "int8" in label for label in labels)
    assert "Q4\\_1 g32" in shown_text(page)


def test_the_recommendation_is_the_command_lines(open_page, stored_home, report_rows):
    from toolkit.report.choice import recommendation
    from ui.tradeoff import _plain

    assert _plain(recommendation(report_rows)) in [element.value for element in open_page(stored_home).markdown]


def test_the_url_chooses_run_and_axes(open_page, stored_home, report_rows):
    with RunStore(stored_home.store) as store:
        store.begin("other-ffffffffffff", "other", store.find_run().facts)
        store.finish("other-ffffffffffff", [StoredRow(report_rows[0], None)], stored_home.reports / "other.html")
    assert len(open_page(stored_home).dataframe[0].value) == 1, "the newest run is shown"
    page = open_page(stored_home, run="demo-0123456789ab", quality="Accuracy", cost="Size")
    assert page.selectbox(key="run").value == "demo-0123456789ab"
    assert page.selectbox(key="quality").value == "Accuracy"
    assert page.selectbox(key="cost").value == "Size"
    assert len(page.dataframe[0].value) == 5
    assert not page.exception


def test_a_stale_link_falls_back(open_page, stored_home):
    page = open_page(stored_home, run="gone", quality="nothing")
    assert not page.exception
    assert page.selectbox(key="run").value == "demo-0123456789ab"


@pytest.mark.parametrize(("quality", "cost"), [("KL", "TTFT"), ("Same top-1", "Output tokens/s"),
                                               ("Flips", "Peak memory")])
def test_other_axes_draw(open_page, stored_home, quality, cost):
    page = open_page(stored_home, quality=quality, cost=cost)
    assert not page.exception
    assert page.selectbox(key="quality").value == quality


def test_empty_says_what_to_run(open_page, tmp_path):
    page = open_page(Home(tmp_path / "nothing"))
    assert not page.exception
    assert "toolkit run examples/demo.yaml" in shown_text(page)


def test_a_run_that_goes_on_is_shown(open_page, stored_home):
    with RunStore(stored_home.store) as store:
        store.begin("next-000000000000", "next", {})
        store.job_progress("next-000000000000", "int8: evaluate", 3.0, 10.0)
    page = open_page(stored_home)
    assert not page.exception
    assert any("int8: evaluate".replace(":", "\\:") in str(element.proto) or "int8" in str(element.proto)
               for element in page.get("progress"))


def test_text_from_a_model_or_job_is_shown_as_it_is(open_page, stored_home):
    labels = " ".join(expander.label for expander in open_page(stored_home).expander)
    assert "<b>" not in labels
    assert "&lt;b&gt;" in labels


def test_the_theme_is_the_palette():
    theme = tomllib.loads((APP.parent / "theme.toml").read_text())["theme"]
    for name, palette in (("light", LIGHT), ("dark", DARK)):
        assert theme[name]["backgroundColor"] == palette.background
        assert theme[name]["secondaryBackgroundColor"] == palette.surface
        assert theme[name]["textColor"] == palette.text
        assert theme[name]["primaryColor"] == palette.accent
        assert theme[name]["greenTextColor"] == palette.verdict["PASS"]
        assert theme[name]["redTextColor"] == palette.verdict["FAIL"]


def test_the_server_is_private():
    settings = dict(flag.removeprefix("--").split("=", 1) for flag in flags(8501, headless=True))
    assert settings["server.address"] == "127.0.0.1"
    assert settings["server.enableXsrfProtection"] == "true"
    assert settings["browser.gatherUsageStats"] == "false"
    assert settings["client.showErrorDetails"] == "none"
