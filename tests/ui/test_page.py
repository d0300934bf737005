"""The tradeoff page through AppTest: it draws what the store holds, the URL decides, empty says what to run."""

import tomllib

import pytest

from toolkit.home import Home
from toolkit.report import words
from toolkit.report.style import DARK, LIGHT
from toolkit.store import RunStore, StoredRow
from ui.__main__ import flags

from .conftest import APP, shown_text


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


def test_without_constraints_the_recommendation_is_the_command_lines(open_page, stored_home, report_rows):
    from toolkit.report.choice import recommendation
    from ui.common import plain

    assert plain(recommendation(report_rows)) in [element.value for element in open_page(stored_home).markdown]


def test_verdicts_say_why_their_intervals_are_wider(open_page, stored_home):
    assert words.WIDER in [caption.value for caption in open_page(stored_home).caption]


def test_sliders_lead_to_another_engine_with_its_reason(open_page, stored_home):
    page = open_page(stored_home)
    before = page.markdown[0].value
    assert "int8 has the best TPOT" in before
    page.select_slider(key="delta").set_value("0.01").run()
    assert "bf16 has the best TPOT" in page.markdown[0].value
    page.select_slider(key="tpot").set_value("30").run()
    assert "No engine meets the constraints" in page.markdown[0].value
    choice = list(page.dataframe[0].value["choice"])
    assert "TPOT 42 ms is above 30" in choice[0]
    assert "the interval of its ΔNLL reaches" in choice[1]


def test_accuracy_may_not_be_lost_beyond_the_limit(open_page, stored_home):
    page = open_page(stored_home, loss="1 points")
    assert "were not compared with the baseline" in page.markdown[0].value
    assert "bf16 has the best TPOT" in page.markdown[0].value


def test_a_price_gives_cost_as_an_axis(open_page, stored_home):
    page = open_page(stored_home)
    assert "Cost" not in page.selectbox(key="cost").options
    assert "price" not in page.dataframe[0].value
    assert "no sweep of this run read a GPU" in shown_text(page)
    assert "Energy" not in page.selectbox(key="cost").options
    page.number_input(key="price").set_value(2.0).run()
    assert page.dataframe[0].value["price"].notna().any()
    assert "cost per million tokens becomes an axis" not in shown_text(page)
    page.selectbox(key="cost").set_value("Cost").run()
    assert not page.exception
    assert list(page.dataframe[0].value["standing"])[3] == "on the frontier"


def test_where_engines_stand_is_said_in_words(open_page, stored_home):
    standing = list(open_page(stored_home).dataframe[0].value["standing"])
    assert standing == ["on the frontier"] * 4 + ["tied"]


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


def test_of_many_runs_the_picker_lists_a_page_and_finds_the_rest(open_page, stored_home, report_rows):
    with RunStore(stored_home.store) as store:
        for number in range(70):
            store.begin(f"bulk-{number:012d}", "bulk", {"model": f"Model{number}"})
            store.finish(f"bulk-{number:012d}", [StoredRow(report_rows[0], None)], stored_home.reports / "x.html")
    page = open_page(stored_home)
    assert len(page.selectbox(key="run").options) == 60
    page.text_input(key="find").set_value("model3").run()
    kept = "bulk-000000000069"  # what is shown stays until another one is chosen
    assert set(page.selectbox(key="run").options) == {kept, *(f"bulk-{n:012d}" for n in (3, *range(30, 40)))}
    old = open_page(stored_home, run="demo-0123456789ab")
    assert old.selectbox(key="run").value == "demo-0123456789ab", "a link to an old run holds"
    page.text_input(key="find").set_value("nothing of that name").run()
    assert "No run matches" in shown_text(page)


def test_a_stale_link_falls_back(open_page, stored_home):
    page = open_page(stored_home, run="gone", quality="nothing")
    assert not page.exception
    assert page.selectbox(key="run").value == "demo-0123456789ab"


@pytest.mark.parametrize(("quality", "cost"), [("KL", "TTFT"), ("Same top-1", "Output tokens/s"),
                                               ("Flips", "Peak memory"), ("Recovery", "TPOT")])
def test_other_axes_draw(open_page, stored_home, quality, cost):
    page = open_page(stored_home, quality=quality, cost=cost)
    assert not page.exception
    assert page.selectbox(key="quality").value == quality


@pytest.mark.parametrize("name", ["tradeoffs", "accuracy", "latency", "engine", "compare"])
def test_empty_says_what_to_run(open_page, tmp_path, name):
    page = open_page(Home(tmp_path / "nothing"), name)
    assert not page.exception
    assert "toolkit run examples/demo.yaml" in shown_text(page)


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
