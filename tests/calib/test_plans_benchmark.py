"""The plans' benchmark file: what may be merged into it, and the command that makes all of its cells."""

import json
import shlex
from pathlib import Path

import pytest

from benchmarks import layerwise, plans
from calib.artifact import Artifact
from calib.calibrate import quantize
from calib.dataset import CalibrationSet
from calib.random_model import Shape, sentences
from calib.recipe import load_recipe
from evals.bench import BenchCell, commit, write_cells

FILE = Path(__file__).parents[2] / "docs" / "benchmarks" / "plans.json"
WHOLE, LAYERS = "small int8 whole time", "small int8 layer by layer time"


def cells(*names, value=1.0):
    return [BenchCell(name=name, value=value, unit="s") for name in names]


def test_one_call_for_a_full_grid_and_one_more_for_what_is_left_over():
    command = plans.command_of([WHOLE, LAYERS, "small fp8 whole disk", "small fp8 layer by layer disk"],
                               Path("docs/plans.json"), 8)
    assert command == ("python -m benchmarks.plans --shape small --recipe int8 fp8 --mode off on --rows 8 "
                       "--json docs/plans.json")
    several = plans.command_of([WHOLE, LAYERS, "small fp8 whole disk", "medium int8 whole time",
                                "medium int8 layer by layer time"], Path("/tmp/plans.json"), 4).split(" && ")
    assert several == [
        "python -m benchmarks.plans --shape small --recipe fp8 --mode off --rows 4 --json plans.json",
        "python -m benchmarks.plans --shape small medium --recipe int8 --mode off on --rows 4 --json plans.json "
        "--merge"]


def test_the_files_command_makes_all_of_its_cells():
    held = json.loads(FILE.read_text())
    names = [cell["name"] for cell in held["cells"]]
    assert held["command"] == plans.command_of(names, Path("docs/benchmarks/plans.json"), plans.ROWS)
    words = shlex.split(held["command"])
    asked = {flag: words[words.index(flag) + 1:] for flag in ("--shape", "--recipe", "--mode")}
    for name in names:
        shape, recipe, rest = name.split(" ", 2)
        mode = "on" if rest.startswith("layer by layer") else "off"
        assert shape in asked["--shape"], name
        assert recipe in asked["--recipe"], name
        assert mode in asked["--mode"], name


def test_cells_are_merged_where_they_compare(tmp_path):
    path = tmp_path / "plans.json"
    assert plans.merged(plans.held_cells(path, 8), cells(WHOLE)) == cells(WHOLE)
    write_cells(path, cells(WHOLE, LAYERS), plans.command_of([WHOLE, LAYERS], path, 8))
    assert plans.merged(plans.held_cells(path, 8), cells(WHOLE, value=2.0)) == [
        *cells(LAYERS), *cells(WHOLE, value=2.0)]


def test_layerwise_keeps_what_its_file_holds_and_refuses_another_first(tmp_path, monkeypatch):
    """The whole of ``benchmarks.layerwise``, on a model of a few thousand weights."""
    monkeypatch.setattr(layerwise, "SHAPE", Shape(hidden=64, inter=128, layers=2, heads=2, kv_heads=1, vocab=512))
    path = tmp_path / "layerwise.json"

    def small(model, calibration, recipe, out):
        quantize(model, load_recipe(recipe), out, calibration=CalibrationSet.open(calibration), layerwise="on",
                 choose_texts=sentences(2, 40))
        return json.loads(Artifact.open(out).file("calibration.json").read_text())
    monkeypatch.setattr(layerwise, "measured", small)
    for number, recipe in enumerate(("fp8", "int8")):
        layerwise.measure(tmp_path / str(number), [recipe], 2, path)
    held = json.loads(path.read_text())
    assert [cell["name"].split()[1] for cell in held["cells"]] == ["fp8", "int8"]
    assert "--recipe fp8 int8 --rows 2" in held["command"]
    with pytest.raises(SystemExit, match="was measured with rows 2"):
        layerwise.measure(tmp_path / "again", ["fp8"], 3, path)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(("key", "value"), [("device", "another CPU"), ("versions", {"torch": "0.1"}),
                                            ("commit", "0123abc"), ("command", "python -m benchmarks.plans --rows 4")])
def test_cells_of_another_making_are_refused(tmp_path, key, value):
    path = tmp_path / "plans.json"
    write_cells(path, cells(LAYERS), plans.command_of([LAYERS], path, 8))
    document = json.loads(path.read_text())
    assert document["commit"] == commit()
    path.write_text(json.dumps(document | {key: value}))
    word = "rows" if key == "command" else key
    with pytest.raises(SystemExit, match=f"was measured with {word} .*into another file"):
        plans.held_cells(path, 8)
