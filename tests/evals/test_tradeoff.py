"""Frontier and recommendation over rows; the metric dictionary; the cell writer."""

import json

import pytest

from calib.errors import UnknownNameError
from evals.bench import BenchCell, cell_of, table, write_cells
from evals.errors import MeasureError
from evals.metric import METRICS, metric
from evals.report import Accuracy, Cell, Estimate, Row
from evals.tradeoff import Constraints, classify, frontier, recommend


def row(recipe, tpot, delta, *, spread=0.0, half=0.001, verdict="PASS", kv="bf16", **fields):
    cell = Cell(batch_size=1, isl=64, osl=8, n=3, ttft_ms=10, ttft_ms_spread=1, tpot_ms=tpot, tpot_ms_spread=spread,
                e2e_ms=50, out_tok_s=100, total_tok_s=900)
    plain = Row(recipe=recipe, kv_cache=kv, device="cpu", emulated=False, engine_digest=recipe, checkpoint_digest="c",
                source_grid=None, size_bytes=100, accuracy=None, kl_mean=None, same_top1=None, flips=None,
                delta_nll=None if delta is None else Estimate(value=delta, ci_low=delta - half, ci_high=delta + half,
                                                              n=40),
                ttft_ms=10, tpot_ms=tpot, out_tok_s=100, batch_size=1, isl=64, osl=8, peak_memory_bytes=None,
                verdict=verdict, verdict_reason=None, cells=[cell])
    return plain.model_copy(update=fields)


def states(rows, *axes):
    return [point.state for point in classify(rows, *axes)]


def test_frontier_tied_and_dominated():
    rows = [row("bf16", 40, None, verdict="BASELINE"), row("int8", 20, 0.017), row("fp8", 30, 0.024),
            row("int4", 15, 0.16), row("twin", 20.4, 0.0171, spread=1.0)]
    assert states(rows) == ["frontier", "frontier", "dominated", "frontier", "tied"]
    points = classify(rows)
    assert points[2].by == 1
    assert points[4].by == 1
    assert [r.recipe for r in frontier(rows)] == ["int4", "int8", "bf16"]
    assert frontier([]) == []


def test_uncertainty_decides_between_tied_and_dominated():
    a, b = row("a", 20, 0.01, half=0.005), row("b", 22, 0.015, half=0.005)
    assert states([a, b]) == ["frontier", "tied"]
    clear = row("b", 22, 0.05, half=0.005)
    assert states([a, clear]) == ["frontier", "dominated"]
    assert states([a, a]) == ["frontier", "frontier"]


def test_direction_comes_from_the_dictionary_and_unmeasured_rows_are_out():
    good = Accuracy(value=0.5, ci_low=0.48, ci_high=0.52, n=900, tasks=["t"])
    bad = Accuracy(value=0.3, ci_low=0.28, ci_high=0.32, n=900, tasks=["t"])
    rows = [row("a", 20, 0.01, accuracy=good), row("b", 25, 0.01, accuracy=bad), row("c", 5, 0.01)]
    assert states(rows, "tpot_ms", "accuracy") == ["frontier", "dominated", "unmeasured"]
    rows = [row("a", 20, 0.01, out_tok_s=50.0), row("b", 25, 0.01, out_tok_s=90.0)]
    assert states(rows, "out_tok_s", "delta_nll") == ["tied", "frontier"]
    with pytest.raises(UnknownNameError):
        classify(rows, "kl_mean", "delta_nll")
    with pytest.raises(UnknownNameError, match="tpot_mss"):
        classify(rows, "tpot_mss", "delta_nll")


def test_recommendation_names_the_best_and_its_equals():
    rows = [row("bf16", 40, None, verdict="BASELINE"), row("int8", 20, 0.017, spread=1), row("fp8", 30, 0.024),
            row("int4", 15, 0.16, verdict="FAIL"), row("int8", 20.4, 0.018, kv="fp8", spread=1)]
    found = recommend(rows)
    assert found.index == 1
    assert found.reason == ("int8 has the best TPOT (20 ms/token) of the 4 of 5 engines that meet every constraint, "
                            "though int8 kv=fp8 cannot be told apart from it.")
    assert found.rejected == {3: "its verdict is FAIL"}


@pytest.mark.parametrize(("constraints", "index", "rejected"), [
    ({"max_delta_nll": 0.02}, 1, {2: "the interval of its ΔNLL reaches +0.0250, above 0.02"}),
    ({"max_delta_nll": 0.0}, 0, {1: "the interval of its ΔNLL reaches +0.0180, above 0"}),
    ({"max_tpot_ms": 10}, None, {0: "TPOT 40 ms is above 10"}),
    ({"min_accuracy": 0.5}, None, {1: "its Accuracy was not measured"}),
    ({"max_peak_memory_bytes": 5}, None, {1: "its Peak memory was not measured"}),
    ({"prefer": "delta_nll"}, 0, {}),
    ({"prefer": "size_bytes"}, 2, {}),
])
def test_constraints(constraints, index, rejected):
    rows = [row("bf16", 40, None, verdict="BASELINE"), row("int8", 20, 0.017), row("fp8", 30, 0.024, size_bytes=50)]
    found = recommend(rows, Constraints(**constraints))
    assert found.index == index
    assert rejected.items() <= found.rejected.items()
    if index is None:
        assert found.reason.startswith("No engine meets the constraints (bf16")


def test_no_rows_and_no_verdict():
    assert recommend([]).index is None
    assert recommend([row("int8", 20, 0.01, verdict=None)]).rejected == {0: "its verdict is missing"}
    assert recommend([row("int8", 20, 0.01, verdict=None)], Constraints(passed_gate=False)).index == 0


def test_every_figure_of_a_row_and_a_cell_is_in_the_dictionary():
    figures = {"accuracy", "delta_nll", "kl_mean", "same_top1", "flips", "ttft_ms", "tpot_ms", "e2e_ms", "out_tok_s",
               "total_tok_s", "peak_memory_bytes", "size_bytes"}
    assert figures <= set(METRICS)
    assert metric("tpot_ms").elsewhere["AIPerf"] == "ITL"
    with pytest.raises(UnknownNameError, match="tpot"):
        metric("tpot")


def test_cells_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "cells.json"
    cells = [cell_of("decode int8 kv=bf16 batch=1 isl=64", [3.0, 1.0, 2.0], "tok/s", floor=9.0, peer=1.5,
                     peer_name="transformers"), cell_of("one", [4.0], "s")]
    write_cells(path, cells, "python benchmarks/x.py", device="cpu")
    document = json.loads(path.read_text())
    assert list(document) == ["cells", "command", "commit", "date", "device", "versions"]
    assert document["cells"][0] == {"name": "decode int8 kv=bf16 batch=1 isl=64", "value": 2.0, "unit": "tok/s",
                                    "floor": 9.0, "peer": 1.5, "peer_name": "transformers", "spread": 2.0}
    assert document["cells"][1]["spread"] is None
    assert "transformers" in table(cells)
    for bad in ([], [cells[0], cells[0]], [BenchCell(name="x", value=float("nan"), unit="s")]):
        with pytest.raises(MeasureError):
            write_cells(tmp_path / "bad.json", bad)
    assert not (tmp_path / "bad.json").exists()
    with pytest.raises(MeasureError, match="no values"):
        cell_of("x", [], "s")


def test_a_result_names_no_folder_of_the_machine_it_was_made_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path.parent / "elsewhere" / "int8"
    monkeypatch.setattr("sys.argv", [f"{tmp_path}/benchmarks/cpu.py", "--engine", str(elsewhere), "--isl", "64"])
    write_cells(tmp_path / "cells.json", [cell_of("one", [4.0], "s")])
    written = json.loads((tmp_path / "cells.json").read_bytes())
    assert written["command"] == "python benchmarks/cpu.py --engine int8 --isl 64"
