"""How much memory does a layerwise calibration really take?

    python -m benchmarks.layerwise [--recipe fp8 int8 int4_awq] [--work DIR] [--json FILE]

Writes a random Llama of 3 GB (bf16) shard by shard, calibrates it layer by layer in a fresh process for each recipe,
and reads the peak of anonymous memory from the checkpoint's own evidence. Asked: at most 1.5 GB and one shard (512 MB
here) of anonymous memory, where the whole pass would hold 6 GB of float32 weights. The model is deleted afterwards.
Each recipe's cell is in FILE as soon as it is measured; cells of other recipes stay there, and a FILE of another
device, version, commit or number of rows is refused before anything is measured. Memory does not depend on
what else the machine does, time does: that is the plans' matter (``benchmarks.plans``).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.plans import held_cells, merged
from calib.artifact import Artifact
from calib.calibrate import quantize
from calib.dataset import CalibrationSet
from calib.random_model import Shape, calibration_set, sentences, write_model
from calib.recipe import load_recipe
from evals.bench import BenchCell, cell_of, table, write_cells

SHAPE = Shape(hidden=2048, inter=8192, layers=23, heads=16, kv_heads=4, vocab=32000, tied=False)
SHARD = 512 * 10**6
ALLOWED = 1_500_000_000 + SHARD


def measured(model: Path, calibration: Path, recipe: str, out: Path) -> dict[str, float]:
    """Calibrate in a fresh process; the evidence it wrote."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.layerwise", "--one", str(model), str(calibration), recipe,
                           str(out)], cwd=Path(__file__).parents[1])
    if done.returncode:
        raise SystemExit(f"calibrating by {recipe} failed")
    evidence: dict[str, float] = json.loads(Artifact.open(out).file("calibration.json").read_text())
    return evidence


def peak_cell(recipe: str, evidence: dict[str, float]) -> BenchCell:
    return cell_of(f"layerwise {recipe} peak anonymous", [evidence["peak_anonymous_bytes"] / 1e9], "GB",
                   floor=ALLOWED / 1e9, peer=4 * SHAPE.parameters / 1e9, peer_name="float32 weights alone")


def measure(work: Path, recipes: list[str], rows: int, json_file: Path | None) -> None:
    """Calibrate by each recipe; say and write what it took."""
    cells = [] if json_file is None else held_cells(json_file, rows)
    model = write_model(work / "model", SHAPE, SHARD)
    calibration_set(model, work / "calibration", rows, 256)
    for recipe in recipes:
        evidence = measured(model, work / "calibration", recipe, work / "out")
        shutil.rmtree(work / "out")
        found = [peak_cell(recipe, evidence)]
        print(table(found), flush=True)
        cells = merged(cells, found)
        if json_file is not None:
            measured_recipes = " ".join(cell.name.split()[1] for cell in cells)
            write_cells(json_file, cells, f"python -m benchmarks.layerwise --recipe {measured_recipes} --rows {rows} "
                        f"--json {json_file.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", default=["fp8", "int8", "int4_awq"])
    parser.add_argument("--rows", type=int, default=8, help="calibration rows of 256 tokens")
    parser.add_argument("--work", type=Path, help="folder for 10 GB of scratch [default: the system's temporary one]")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        model, calibration, recipe, out = asked.one
        quantize(model, load_recipe(recipe), Path(out), calibration=CalibrationSet.open(calibration),
                 choose_texts=sentences(2, 40), layerwise="on")
        return
    with tempfile.TemporaryDirectory(dir=asked.work) as work:
        measure(Path(work), asked.recipe, asked.rows, asked.json)


if __name__ == "__main__":
    main()
