"""The plans' benchmark file: what may be merged into it, and the command that makes all of its cells."""

import json
import shlex
from pathlib import Path

import pytest

from benchmarks import plans
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
    assert plans.merged(path, cells(WHOLE), 8) == cells(WHOLE)
    write_cells(path, cells(WHOLE, LAYERS), plans.command_of([WHOLE, LAYERS], path, 8))
    assert plans.merged(path, cells(WHOLE, value=2.0), 8) == [*cells(LAYERS), *cells(WHOLE, value=2.0)]


@pytest.mark.parametrize(("key", "value"), [("device", "another CPU"), ("versions", {"torch": "0.1"}),
                                            ("commit", "0123abc"), ("command", "python -m benchmarks.plans --rows 4")])
def test_cells_of_another_making_are_refused(tmp_path, key, value):
    path = tmp_path / "plans.json"
    write_cells(path, cells(LAYERS), plans.command_of([LAYERS], path, 8))
    document = json.loads(path.read_text())
    assert document["commit"] == commit()
    path.write_text(json.dumps(document | {key: value}))
    word = "rows" if key == "command" else key
    with pytest.raises(SystemExit, match=f"was measured with {word} .*leave --merge out"):
        plans.merged(path, cells(WHOLE), 8)
