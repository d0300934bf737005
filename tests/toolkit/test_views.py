"""What pages show, as pure functions: an engine taken apart, answers in words, choices, layers, labels, exports."""

import pytest

from calib.recipe import load_recipe
from evals.loads import Objectives
from evals.report import Estimate
from evals.tradeoff import Constraints
from toolkit import layers
from toolkit.layers import LayerCost, Sensitivity
from toolkit.report import axes, charts, choice, export, plots, several, speed, structure, style, tables
from toolkit.store import Run

GRID = {"dtype": "int8"}


def linear(*parts, rows, k, layer):
    return {"op": "linear", "x": f"L{layer}.in", "parts": [f"model.layers.{layer}.{part}" for part in parts],
            "rows": list(rows), "k": k, "weight": GRID, "out": f"L{layer}.out"}


def plan(ops_unfused=16):
    one = [{"op": "add_norm", "x": f"L{n}.a", "weight": f"model.layers.{n}.norm", "quant": {"grid": GRID},
            "out": f"L{n}.n"} if n else {"op": "rms_norm", "x": "embed", "weight": "model.layers.0.norm",
                                         "quant": {"grid": GRID}, "out": "L0.n"} for n in (0, 1)]
    ops = [{"op": "embed", "weight": "model.embed_tokens", "out": "embed"}]
    for n in (0, 1):
        ops += [one[n], linear("q_proj", "k_proj", "v_proj", rows=(8, 4, 4), k=8, layer=n),
                {"op": "rope_kv", "qkv": f"L{n}.out", "layer": n, "out": f"L{n}.q"}]
    ops += [{"op": "rms_norm", "x": "end", "weight": "model.norm", "out": "norm"}]
    return {"program": {"ops": ops}, "model": {"num_layers": 2}, "ops_unfused": ops_unfused,
            "kernels": [{"op": "linear", "shape": "n=16 k=8 weight=int8", "impl": "split"}],
            "memory": {"weights": 100, "activations": 10, "kv_cache": 50, "graphs": 0, "cap": None}}


def test_the_program_before_fusion_is_written_down_and_counted():
    found = structure.program_of(plan(ops_unfused=19))
    assert found.agrees, "1 + (2 + 3 + 3) + (3 + 3 + 3) + 1"
    assert [step.fused for step in found.head] == ["embed"]
    assert [step.before for step in found.layer] == [
        ("add", "rms_norm", "quantize"), ("linear q_proj", "linear k_proj", "linear v_proj"),
        ("rope q", "rope k", "kv_write")]
    assert [step.fused for step in found.tail] == ["rms_norm"]
    assert not structure.program_of(plan(ops_unfused=20)).agrees
    assert structure.memory_of(plan()) == [("weights", 100), ("KV cache, when full", 50), ("activations", 10)]


def test_kernels_stand_against_their_floor():
    timing = {"shape": "n=16 k=8 weight=int8", "milliseconds": {"split": {"1": 1e-6, "8": 4e-6}, "half": {"1": 9e-6}}}
    kernels, floor = structure.kernels_of(plan(), {"tuning": [timing]})
    assert [(kernel.impl, kernel.tokens, kernel.fraction) for kernel in kernels] == [("split", 1, 1.0),
                                                                                     ("split", 8, None)]
    assert kernels[0].gigabytes_s == pytest.approx(16 * 8 / 1e6 / 1e-6)
    assert "best rate" in floor
    assert structure.shape_name(kernels[0], plan()) == "q_proj + k_proj + v_proj"
    assert structure.kernels_of(plan(), {})[0] == []


def test_a_loss_beyond_the_limit_bars_an_engine_and_says_so(report_rows):
    loss = {row.engine_digest: Estimate(value=0.02 * number, ci_low=0, ci_high=0.1, n=50)
            for number, row in enumerate(report_rows)}
    free = choice.decide(report_rows, Constraints())
    assert free.sentence == choice.recommendation(report_rows)
    strict = choice.decide(report_rows, Constraints(), loss, 0.03)
    assert strict.engine == report_rows[1].engine_digest
    assert "int8: it lost 4.0 [0.0, 10.0] points of accuracy, 3.0 allowed" in strict.sentence
    nothing = choice.decide(report_rows[2:3], Constraints(), {}, 0.03)
    assert nothing.engine is None
    assert "were not compared" in nothing.sentence


def test_recovery_and_cost_are_derived_with_their_intervals(report_rows):
    table = axes.derive(tables.frame(report_rows), report_rows, 2.0)
    assert table["recovery"][0] == 1.0
    assert table["recovery_high"][2] == pytest.approx((0.369 + 0.04) / 0.371)
    assert table["price"][2] == pytest.approx(2.0 / (1000 / 19.5 * 3600) * 1e6)
    cheap = choice.standings(report_rows, axes.price_axis(), axes.RECOVERY)
    assert cheap[report_rows[3].engine_digest].state == "frontier"


def test_energy_is_an_axis_where_a_counter_was_read(report_rows):
    from evals.gpu_state import GpuState
    from evals.report import Cell

    assert axes.usable(tables.frame(report_rows), {"energy": axes.ENERGY}) == []
    state = GpuState(name="g", sm_clock_mhz=1, temperature_c=40, power_limit_w=700.0, slowed=(), joules=30.0)
    def with_energy(row, joules):
        cell = Cell(batch_size=row.batch_size, isl=row.isl, osl=row.osl, n=3, ttft_ms=1.0, ttft_ms_spread=0.1,
                    tpot_ms=1.0, tpot_ms_spread=0.1, e2e_ms=1.0, out_tok_s=1.0, total_tok_s=1.0,
                    gpu=state.model_copy(update={"joules_per_token": joules}))
        other = cell.model_copy(update={"isl": row.isl + 1, "gpu": state.model_copy(update={"joules_per_token": 9.0})})
        return row.model_copy(update={"cells": [other, cell]})
    rows = [with_energy(row, 0.1 * (number + 1)) for number, row in enumerate(report_rows[:3])]
    table = tables.frame([*rows, report_rows[3]])
    assert table["joules_per_token"].tolist()[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert table["joules_per_token"].isna()[3], "no counter, no figure"
    stand = choice.standings(rows, axes.ENERGY, axes.QUALITY["delta_nll"])
    assert stand[rows[0].engine_digest].state == "frontier"
    assert stand[rows[2].engine_digest].state != "frontier", "more energy and more loss than the baseline"


def test_labels_do_not_cover_each_other(report_rows):
    table = tables.frame(report_rows)
    x, y = axes.COST["tpot_ms"], axes.QUALITY["delta_nll"]
    places = charts._label_places(table, x, y)
    assert set(places) == {row.engine_digest for row in report_rows}
    near = [places[row.engine_digest] for row in report_rows if row.recipe == "int8"]
    assert len(set(near)) == 2, "int8 and int8 kv=fp8 are neighbours"


def test_goodput_counts_what_meets_every_objective(report_rows):
    found = speed.served(report_rows[:3], [], Objectives(tpot_ms=50))
    by_name = {line.name: line for line in found}
    assert (by_name["int8"].met, by_name["int8"].cells) == (2, 2)
    assert by_name["int8"].goodput_req_s == pytest.approx(8 / (36 * 19.5) * 1000)
    assert by_name["bf16"].best.batch_size == 1
    none = speed.served(report_rows[:1], [], Objectives(tpot_ms=1))
    assert (none[0].best, none[0].goodput_req_s, none[0].met) == (None, None, 0)


def test_runs_of_other_models_are_not_comparable():
    one, other = (Run(name, name, "finished", "", "", {"model_digest": name, "evaluation_digest": "e"}, None)
                  for name in ("a", "b"))
    assert several.comparable([one, other]) == ["they are of different models"]
    assert several.facts([one, other]) == [{"fact": "model digest", "a": "a", "b": "b"}]
    one, other = (Run(name, name, "finished", "", "", {"versions": {"torch": "2", **more}}, None)
                  for name, more in (("a", {}), ("b", {"triton": "3"})))
    assert several.facts([one, other]) == [{"fact": "versions: triton", "a": "–", "b": "3"}]


def costs():
    return Sensitivity(model="m", model_digest="d" * 64, created="2026-11-29", costs=[
        LayerCost(layer=layer, format=name, loss=loss, parameters=1000) for layer in (0, 1)
        for name, loss in (("fp8", 0.001), ("int4_awq", 0.02 * (layer + 1)))])


def test_leaving_a_layer_out_is_predicted():
    found = layers.predict(costs(), "int4_awq", [1])
    assert (found.loss, found.loss_all) == (pytest.approx(0.02), pytest.approx(0.06))
    assert (found.size, found.size_all) == (2000 + 531, 1062)
    assert layers.advice(costs(), "int4_awq", 1) == [1]
    assert layers.predicted_tpot(layers.predict(costs(), "int4_awq", [0, 1]), costs(), 10.0, 20.0) == 20.0
    assert layers.predicted_tpot(layers.predict(costs(), "int4_awq", []), costs(), 10.0, 20.0) == 10.0
    assert costs().formats == ["fp8", "int4_awq"]


def test_raising_a_layer_is_predicted_from_what_int8_costs():
    unknown = layers.predict(costs(), "int4_awq", [], [1])
    assert (unknown.loss, unknown.size) == (None, 1000 + 531)
    measured = Sensitivity(**costs().model_dump(exclude={"costs"}), costs=[*costs().costs, *(
        LayerCost(layer=layer, format="int8", loss=0.003, parameters=1000) for layer in (0, 1))])
    assert layers.predict(measured, "int4_awq", [], [1]).loss == pytest.approx(0.02 + 0.003)
    assert layers.predict(measured, "int4_awq", [0], [1]).loss == pytest.approx(0.003)
    assert [name for name in ("bf16", "fp8", "int8", "int4_awq", "int4_gptq", "int4_awq_clip", "my.yaml")
            if layers.can_raise(name)] == ["int4_awq", "int4_awq_clip"]


def test_the_exported_recipe_is_one_that_quantize_takes(tmp_path):
    name = layers.recipe_name("int4_awq", [3], [1, 2])
    (tmp_path / f"{name}.yaml").write_text(layers.recipe_text("int4_awq", [3], [2, 1]))
    recipe = load_recipe(tmp_path / f"{name}.yaml")
    assert (recipe.name, name) == ("int4_awq-keep-3-int8-1-2",) * 2
    assert recipe.summary == "int4_awq with 1 layer left in 16 bits and 2 layers raised to int8, chosen by sensitivity"
    assert (recipe.keep, recipe.raised) == (("model.layers.3.*",), {"int8": ("model.layers.1.*", "model.layers.2.*")})


def test_a_heat_map_marks_what_has_more_bits():
    figure = plots.heat_map(["a", "b"], ["fp8"], [[1.0], [3.0]], "loss", marked=[("a", "fp8")], raised=[("b", "fp8")])
    assert [(list(trace.y), trace.marker.symbol) for trace in figure.data[1:]] == [
        (["a"], "circle-open"), (["b"], "triangle-up-open")]


def test_a_heat_map_with_both_signs_has_its_middle_at_zero():
    figure = plots.heat_map(["a", "b"], ["fp8"], [[-1.0], [3.0]], "loss")
    assert (figure.data[0].zmin, figure.data[0].zmax) == (-3.0, 3.0)
    assert plots.heat_map(["a"], ["fp8"], [[2.0]], "amax").data[0].zmin is None


def test_tints_and_markers():
    assert style.LIGHT.tint(1) == style.LIGHT.accent
    assert style.LIGHT.tint(0) == style.LIGHT.background
    assert "fill='none'" in style.marker_svg("int8", "fp8", "#000000")


def test_exports_escape_what_others_would_run():
    lines = [{"what": "=HYPERLINK(1)", "text": "<b>|x", "none": None, "n": -3}]
    assert "'=HYPERLINK(1)" in export.lines_as(lines, "csv")
    assert ",-3" in export.lines_as(lines, "csv")
    assert "&lt;b&gt;\\|x" in export.lines_as(lines, "md")
    html = export.lines_as(lines, "html", "<t>")
    assert "<b>" not in html
    assert "<title>&lt;t&gt;" in html
