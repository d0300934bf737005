"""How rows are shown: aligned, escaped, with intervals; a figure that was not measured is never a zero."""

import io
import json
import math
import re

import pytest
from rich.console import Console

from evals.report import Estimate
from toolkit.errors import UsageError
from toolkit.report import axes, charts, choice, compare, export, html, tables, words
from toolkit.report.status import run_parts
from toolkit.report.style import DARK, LIGHT
from toolkit.store import RunStore


def text_of(renderable, width=170):
    """As ``Session.show`` prints it: text from outside is never markup."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(renderable, markup=False)
    return console.file.getvalue()


@pytest.mark.parametrize(("value", "written"), [
    (0.0144, "+0.0144"), (-0.0144, "−0.0144"), (0.0, "0.0000"), (-0.00001, "0.0000"), (None, "–")])
def test_nats(value, written):
    assert words.nats(value) == written


@pytest.mark.parametrize(("value", "written"), [
    (None, "–"), (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (164_000_000, "164 MB"), (1_150_000_000, "1.15 GB")])
def test_size(value, written):
    assert words.size(value) == written


def test_an_interval_is_written_with_its_ends():
    estimate = Estimate(value=0.0144, ci_low=-0.001, ci_high=0.03, n=64)
    assert words.nats_interval(estimate) == "+0.0144 [−0.0010, +0.0300]"
    assert words.percent_interval(Estimate(value=0.5, ci_low=0.4, ci_high=0.61, n=9)) == "50.0 % [40.0, 61.0]"


def test_the_terminal_table_has_a_line_an_engine(report_rows):
    shown = text_of(tables.terminal(report_rows))
    assert "[dim" not in shown
    for part in ("int4_awq", "int8 kv=fp8", "+0.0144 [+0.0094, +0.0194]", "36.9 % [32.9, 40.9]", "INCONCLUSIVE"):
        assert part in shown


def test_a_narrow_terminal_gets_the_columns_a_choice_is_made_by(report_rows):
    shown = text_of(tables.terminal(report_rows, 100), 100)
    assert "TPOT" in shown
    assert "TTFT" not in shown
    assert "…" not in shown


@pytest.mark.parametrize("width", [80, 90, 100, 110, 120, 130, 140, 150])
def test_no_cell_is_cut_at_any_usual_width(report_rows, width):
    """Eighty columns cut TPOT and the verdict down to an ellipsis once."""
    shown = text_of(tables.terminal(report_rows, width), width)
    assert "…" not in shown
    for part in ("TPOT", "+0.0144 [+0.0094, +0.0194]", "INCONCLUSIVE", "int8 kv=fp8"):
        assert part in shown


def test_a_figure_that_was_not_measured_is_no_zero(report_rows):
    bare = report_rows[2].model_copy(update={
        "accuracy": None, "delta_nll": None, "kl_mean": None, "same_top1": None, "flips": None, "ttft_ms": None,
        "tpot_ms": None, "out_tok_s": None, "batch_size": None, "isl": None, "osl": None, "peak_memory_bytes": None,
        "verdict": None, "verdict_reason": None, "cells": []})
    table = tables.frame([bare])
    assert table[["delta_nll", "accuracy", "tpot_ms", "peak_memory_bytes"]].isna().all().all()
    assert math.isnan(table["tpot_ms_low"][0])
    line = next(line for line in text_of(tables.terminal([bare])).splitlines() if line.strip().startswith("int8"))
    assert re.split(r"\s{2,}", line.strip()) == ["int8", *["–"] * 8, "164 MB", "–",
                                                "not judged"]
    assert axes.usable(table, axes.QUALITY) == []


def test_markdown_and_csv_are_defused(report_rows):
    odd = report_rows[0].model_copy(update={"recipe": "=cmd|' /C calc'!A0<script>"})
    shown = tables.markdown([odd])
    assert "<script>" not in shown
    assert shown.count("\n") == 3
    assert "'=cmd" in tables.csv([odd])


def test_csv_has_full_precision(report_rows):
    assert "0.0144" in tables.csv(report_rows)
    assert tables.csv(report_rows).count("\n") == 6


def test_the_tradeoff_carries_digests_and_intervals(report_rows):
    x, y = axes.COST["tpot_ms"], axes.QUALITY["delta_nll"]
    figure = charts.tradeoff(tables.frame(report_rows), x, y, choice.standings(report_rows, x, y), LIGHT, 0.05)
    points = [trace for trace in figure.data if trace.customdata is not None]
    assert [point.customdata[0] for point in points] == [row.engine_digest for row in report_rows]
    int8 = points[2]
    assert int8.error_y.array[0] == pytest.approx(0.005)
    assert int8.error_x.array[0] == pytest.approx(0.5)
    frontier = next(trace for trace in figure.data if trace.name == "frontier")
    assert list(frontier.x) == sorted(frontier.x)
    assert "allowed" in figure.layout.annotations[0].text


def test_recipes_differ_without_colour(report_rows):
    x, y = axes.COST["tpot_ms"], axes.QUALITY["delta_nll"]
    figure = charts.tradeoff(tables.frame(report_rows), x, y, {}, LIGHT)
    symbols = [trace.marker.symbol for trace in figure.data]
    assert len(set(symbols)) == 5
    assert symbols[4] == f"{symbols[2]}-open"


@pytest.mark.parametrize("key", ["kl_mean", "flips", "same_top1"])
def test_what_only_raises_alarms_has_no_frontier(report_rows, key):
    assert choice.standings(report_rows, axes.COST["tpot_ms"], axes.QUALITY[key]) == {}


def luminance(color):
    channels = [int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_every_colour_is_readable(palette):
    """Text reaches 4.5:1 (WCAG AA), marks 3:1 against the background."""
    back = luminance(palette.background)
    for color, least in [(palette.text, 4.5), (palette.muted, 4.5), *[(c, 4.5) for c in palette.verdict.values()],
                         *[(c, 3.0) for c in (*palette.series.values(), *palette.other)]]:
        bright, dark = max(back, luminance(color)), min(back, luminance(color))
        assert (bright + 0.05) / (dark + 0.05) >= least, color


def test_the_html_report_needs_no_network_and_escapes(stored_home):
    with RunStore(stored_home.store) as store:
        page = export.render(store, store.find_run(), "html")
    assert "default-src 'none'" in page
    own = page.replace(page[page.index("<script>"):page.index("</script>")], "")
    assert not re.search(r"(src|href)=.?https?://", own)
    assert "<b>fp8</b>" not in own.replace("<b>fp8</b> reason", "")
    assert "reason of int8 &lt;b&gt;fp8&lt;/b&gt;" in own
    for part in ("Take" if "Take" in page else "best", "int4_awq", "INCONCLUSIVE", "Does the engine add loss"):
        assert part in page


def test_figures_cannot_end_the_script(report_rows):
    odd = [row.model_copy(update={"recipe": "</script><script>alert(1)</script>"}) for row in report_rows[:2]]
    page = html.Page(title="t", run="r", finished="", rows=odd, model_deltas=[None, None], recommendation="", facts=[],
                     definitions=[])
    assert "<script>alert(1)" not in html.render(page)


def test_agreement_is_said_when_intervals_hold_and_when_they_do_not(report_rows):
    row = report_rows[2]
    near = words.agreement(row, row.delta_nll.model_copy(update={"value": 0.0150}))
    far = words.agreement(row, Estimate(value=0.2, ci_low=0.19, ci_high=0.21, n=64))
    assert near.agrees
    assert near.added == pytest.approx(-0.0006)
    assert not far.agrees
    assert words.agreement(row, None) is None
    exact = Estimate(value=0.0, ci_low=0.0, ci_high=0.0, n=64)
    assert words.Agreement("bf16", Estimate(value=1.6e-5, ci_low=1.5e-5, ci_high=1.7e-5, n=64), exact).agrees
    exact = Estimate(value=0.0, ci_low=0.0, ci_high=0.0, n=64)
    rounded = Estimate(value=1e-6, ci_low=5e-7, ci_high=1.5e-6, n=64)
    assert words.Agreement("bf16", rounded, exact).agrees, "two float32 programs differ by this much"
    visible = Estimate(value=1e-3, ci_low=9e-4, ci_high=1.1e-3, n=64)
    assert not words.Agreement("bf16", visible, exact).agrees


def test_a_run_is_printed_whole(stored_home):
    with RunStore(stored_home.store) as store:
        run = store.find_run()
        shown = "".join(text_of(part) for part in run_parts(run, store.rows(run.id)))
    for part in ("demo-0123456789ab", "Emulated on this device", "Q4_1 g32", "within", "corrected for all looks",
                 "demo.html"):
        assert part in shown


@pytest.mark.parametrize("format", ["csv", "md", "json", "html"])
def test_every_export_renders(stored_home, format):
    with RunStore(stored_home.store) as store:
        content = export.render(store, store.find_run(), format)
    assert "int4" in content
    if format == "json":
        assert json.loads(content)["agreement"][0]["agrees"] is True


def test_runs_on_other_data_are_not_compared(stored_home):
    with RunStore(stored_home.store) as store:
        run = store.find_run()
        rows = store.rows(run.id)
    found = compare.compare_runs(run, rows, run, rows)
    assert all(line.same_engine and not change.seen for line in found.lines for change in line.changes.values())
    other = type(run)(**{name: getattr(run, name) for name in run.__slots__} | {
        "facts": run.facts | {"evaluation_digest": "other"}})
    with pytest.raises(UsageError, match="evaluation digest differs"):
        compare.compare_runs(run, rows, other, rows)
    assert "int4_awq" in "".join(text_of(part) for part in compare.comparison_table(found))
