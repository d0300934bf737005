"""The recipes page: the frontier and the sentences follow from the rows."""

from pathlib import Path

from benchmarks.recipes_table import Judged, Measured, advice, frontier, page_of, table, write_page


def row(name, loss, size, *, dtype="int8", activation="16-bit", se=0.001, tok_s=None, **changes):
    settings = {"name": name, "recipe": name, "kv": "bf16", "lm_head": None, "summary": "", "weight_dtype": dtype,
                "scheme": f"W {dtype} channel · A {activation} · KV bf16", "delta_nll": loss, "delta_nll_se": se,
                "kl": 0.01, "same_top1": 0.9, "base_nll": 3.0, "size_bytes": size, "calibration_seconds": 5.0,
                "tokens": 4096, "layout": "compressed-tensors", "tok_s": tok_s,
                "tok_s_spread": None if tok_s is None else 1.0, "engine": None if tok_s is None else "cpu"}
    return Judged(**(settings | changes))


ROWS = [row("bf16", 0.0, 270_000_000, dtype="bf16", tok_s=20.0), row("small", 0.2, 90_000_000, dtype="int4"),
        row("worse", 0.3, 95_000_000, dtype="int4"), row("good", 0.01, 160_000_000, tok_s=40.0),
        row("int8", 0.02, 160_000_000, activation="int8 token dynamic"),
        row("int8_static", 0.5, 160_000_000, activation="int8 tensor"),
        Judged(name="nvfp4", recipe="nvfp4", kv="bf16", lm_head=None, summary="", weight_dtype="nvfp4",
               refused="no chip")]


def test_the_frontier_holds_what_nothing_beats():
    assert [one.name for one in frontier(ROWS[1:6])] == ["small", "good"]


def test_sentences_name_the_rows_that_the_figures_name():
    text = "\n".join(advice(ROWS))
    assert "`small` (90 MB, +0.200 ± 0.001) → `good` (160 MB, +0.010 ± 0.001)" in text
    assert "`good` loses least" in text
    assert "too it is `int8` (+0.020 ± 0.001). Of those, `int8_static` is last (+0.500 ± 0.001), behind by 0.48" in text
    assert "ahead of `worse` by 0.100 nats;" in text
    assert "instead of one per token costs 0.480 nats, where" in text
    assert "`good`, 40.0 tokens/s, 2.00 times bf16's" in text
    changed = [ROWS[0], *(one.model_copy(update={"delta_nll": 0.021, "delta_nll_se": 0.01}) if one.name == "int8_static"
                          else one for one in ROWS[1:])]
    assert "costs nothing that can be told from noise (+0.001 ± 0.020 nats)" in "\n".join(advice(changed))
    assert "`int8` loses least (+0.020 ± 0.001); its activations are in eight bits too. Of" in "\n".join(
        advice([one for one in changed if one.name != "good"]))


def test_a_single_row_gives_no_advice():
    assert advice(ROWS[:1]) == advice(ROWS[3:4]) == []


def written(folder, **what):
    write_page(folder / "page.md", folder / "cells.json", folder / "rows.json",
               Measured(model="tiny", device="two cores", **what))
    held = Measured.model_validate_json((folder / "rows.json").read_bytes())
    assert page_of(held) == (folder / "page.md").read_text(), "the page follows from its rows alone"


def test_the_page_says_what_was_refused_and_what_was_not_measured(tmp_path):
    assert "| nvfp4 | refused here: no chip |" in table(ROWS)
    written(tmp_path, rows=ROWS, missing=("later",))
    page = (tmp_path / "page.md").read_text()
    assert "Not measured in this run: later." in page
    assert "Calibrated on no text; judged on 16 rows, 4,096 tokens of evaluation text" in page
    assert "| `w4a8_fp8` | int4 g128 | fp8_e4m3 token dynamic | gptq | compressed-tensors | 16 rows |" in page
    assert "| `fp8_dynamic` | fp8_e4m3 channel | fp8_e4m3 token dynamic | max | compressed-tensors | none |" in page
    assert "| good | +0.010 ± 0.001 | 0.0100 | 0.900 | 160.0 | 5 (0) | 40.0 (1.0) | compressed-tensors |" in page
    assert '"delta_nll good"' in (tmp_path / "cells.json").read_text()


def test_the_page_in_the_repository_says_how_many_rows_it_was_made_with():
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "recipes.md").read_text()
    assert page == page_of(Measured.model_validate_json((docs / "benchmarks" / "recipes-rows.json").read_bytes())), \
        "run python -m benchmarks.recipes --redraw"
    assert "Calibrated on 8 rows of 256 tokens, also where a recipe's own number of rows above is larger; judged on " \
           "8 rows, 2,048 tokens of evaluation text" in page


def test_a_figure_that_is_asked_for_is_met_or_not_and_the_load_is_said(tmp_path):
    longer = [row("int4_awq", 0.1601, 1, dtype="int4", tokens=8192), row("int4_gptq", 0.16, 1, dtype="int4")]
    loaded = [one.model_copy(update={"load": 3.25, "calibration_tokens": 2048}) if one.tok_s else one for one in ROWS]
    written(tmp_path, rows=loaded, longer=longer)
    page = (tmp_path / "page.md").read_text()
    figures = "+0.160 ± 0.001 (KL 0.0100, same top-1 0.900); asked: at most 0.16,"
    assert f"`int4_awq` on 8,192 tokens: {figures} not met." in page
    assert f"`int4_gptq` on 4,096 tokens: {figures} met." in page
    assert "`int4_awq_clip`: not measured; asked: at most 0.16." in page
    assert "Calibrated on 8 rows of 256 tokens, also where" in page
    assert "is larger; judged on 16 rows, 4,096 tokens" in page
    assert "load average was 3.2 as the timing began" in page
    assert '"delta_nll int4_awq longer"' in (tmp_path / "cells.json").read_text()
