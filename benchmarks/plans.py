"""Do plans keep their word? Planned against measured time, memory and disk; and what a plan says of models one knows.

    python -m benchmarks.plans [--shape small medium] [--recipe fp8 int8 int4_awq] [--json FILE] [--doc docs/plans.md]

*Measured*: random Llamas are calibrated in fresh processes, by each recipe, as a whole and layer by layer. Time and
peak of anonymous memory come from the checkpoint's own evidence, disk from its files. The plan is made first, with
its rehearsal. Asked: time within 35 %, memory within 10 %, disk to the byte. A shape's cells may be measured one call
at a time (``--shape``, ``--recipe``); ``--merge`` keeps the cells that a JSON file holds, where device, versions,
commit and rows are the same. The file's command is one that measures all of its cells.

A rehearsal and a calibration feel what else the machine does. So beside each time stand the cores that all other
processes kept busy, during the rehearsal and during the calibration (``/proc/stat`` less our own processes' CPU
seconds): where the two differ, the times may differ by it, and no plan could have known.

*Known models*: plans from their published config.json alone, no weights; what is not supported is refused, and the
table says in which words.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.known_models import KNOWN
from calib.artifact import Artifact, installed_versions
from calib.calibrate import quantize
from calib.dataset import CalibrationSet
from calib.errors import ToolkitError
from calib.plan import CalibrationPlan, LayerwiseChoice, make_plan
from calib.random_model import Shape, calibration_set, sentences, write_model
from calib.recipe import load_recipe
from calib.rehearsal import estimate
from evals.bench import BenchCell, cell_of, commit, device_name, table, write_cells
from toolkit import foreseeing

SHAPES = {"small": Shape(hidden=512, inter=1536, layers=12, heads=8, kv_heads=4, vocab=8192),
          "medium": Shape(hidden=1024, inter=2816, layers=14, heads=16, kv_heads=4, vocab=16384),
          "large": Shape(hidden=1536, inter=4096, layers=24, heads=12, kv_heads=4, vocab=32768)}
#: ``--layerwise`` -> how a cell's name says it.
WAYS: dict[LayerwiseChoice, str] = {"off": "whole", "on": "layer by layer"}
MODES: tuple[LayerwiseChoice, ...] = tuple(WAYS)
TIME_WITHIN, MEMORY_WITHIN = 0.35, 0.10
LENGTH, ROWS = 256, 8


@dataclass(frozen=True, slots=True)
class Compared:
    """One calibration: what was planned, and what it took."""

    name: str
    plan: CalibrationPlan
    seconds: float
    memory: int
    disk: int
    planning: Load
    calibrating: Load


@dataclass(slots=True)
class Load:
    """Cores kept busy meanwhile: by our own processes, and by all others."""

    ours: float = 0.0
    others: float = 0.0


@contextmanager
def watched() -> Iterator[Load]:
    """Fills the Load when the block ends. Linux only, like the memory figures."""
    found, start, all_before, ours_before = Load(), time.monotonic(), _all_cpu_seconds(), _our_cpu_seconds()
    yield found
    took, ours = time.monotonic() - start, _our_cpu_seconds() - ours_before
    found.ours = ours / took
    found.others = max(0.0, _all_cpu_seconds() - all_before - ours) / took


def _all_cpu_seconds() -> float:
    """CPU seconds of everything since the machine started, without idling and waiting for disks."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _our_cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def compare(model: Path, calibration: Path, shape: str, recipe: str, mode: LayerwiseChoice, work: Path, rows: int
            ) -> Compared:
    """Plan, calibrate in a fresh process, read what it took."""
    out = work / "out"
    with watched() as planning:
        planned = estimate(make_plan(model, load_recipe(recipe), length=LENGTH, layerwise=mode), rows, LENGTH,
                           work / "rehearsals")
    with watched() as calibrating:
        done = subprocess.run([sys.executable, "-m", "benchmarks.plans", "--one", str(model), str(calibration), recipe,
                               str(out), mode], cwd=Path(__file__).parents[1])
    if done.returncode:
        raise SystemExit(f"calibrating {shape} by {recipe} failed")
    artifact = Artifact.open(out)
    evidence = json.loads(artifact.file("calibration.json").read_text())
    disk = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    shutil.rmtree(out)
    return Compared(f"{shape} {recipe} {WAYS[mode]}", planned, evidence["seconds"], evidence["peak_anonymous_bytes"],
                    disk, planning, calibrating)


def cells_of(one: Compared) -> list[BenchCell]:
    """Value: measured; peer: planned. Of loads: during the calibration; during the rehearsal."""
    loads = [cell_of(f"{one.name} {whose} cores", [round(now, 2)], "cores", peer=round(then, 2), peer_name="rehearsal")
             for whose, now, then in (("our", one.calibrating.ours, one.planning.ours),
                                      ("others'", one.calibrating.others, one.planning.others))]
    return [*loads,
            cell_of(f"{one.name} time", [one.seconds], "s", peer=one.plan.seconds, peer_name="planned"),
            cell_of(f"{one.name} memory", [one.memory / 1e6], "MB", peer=one.plan.memory_bytes / 1e6,
                    peer_name="planned"),
            cell_of(f"{one.name} disk", [one.disk], "bytes", peer=one.plan.size_bytes, peer_name="planned")]


def known_rows(recipes: list[str]) -> list[list[str]]:
    """What a plan says of each known model and recipe."""
    rows = []
    for name, config in KNOWN.items():
        for recipe in recipes:
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder) / name
                place.mkdir()
                (place / "config.json").write_text(json.dumps(config))
                try:
                    plan = foreseeing.planned(make_plan(place, load_recipe(recipe), memory=16 * 10**9, tp=2), config)
                except ToolkitError as error:
                    rows.append([name, "–", error.message.replace(str(place), name), "", "", "", ""])
                    break
            rows.append([name, recipe, f"{plan.parameters / 1e9:.2f} B", f"{plan.size_bytes:,}",
                         f"{plan.memory_bytes / 1e9:.1f} GB", "yes" if plan.layerwise else "no",
                         ", ".join(one.runtime for one in plan.loaders if one.loads)])
    return rows


def document(cells: list[dict[str, object]], device: str, recipes: list[str]) -> str:
    """docs/plans.md; the table of measured cells only where there are any."""
    lines = [_ABOUT, *(_compared(cells, device) if cells else [])]
    lines += ["## What a plan says of known models", "", "From their published config.json alone, with a bound of "
              "16 GB on calibration's memory and two devices (`--memory 16GB --tp 2`). Memory is beside what the "
              "libraries take.", "",
              "| model | recipe | parameters | bytes on disk | memory | layer by layer | loads |",
              "|---|---|---|---:|---:|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in known_rows(recipes))]) + "\n"


def _compared(cells: list[dict[str, object]], device: str) -> list[str]:
    shapes = [f"{name}: {shape.parameters / 1e6:.0f} M parameters" for name, shape in SHAPES.items()
              if any(str(cell["name"]).startswith(f"{name} ") for cell in cells)]
    others = {str(cell["name"]).removesuffix(" others' cores"): f"{cell['peer']} / {cell['value']}" for cell in cells
              if str(cell["name"]).endswith(" others' cores")}
    lines = ["## Planned against measured", "", f"Measured on {device}, random Llamas ({', '.join(shapes)}), "
             f"calibrated on rows of {LENGTH} tokens. Disk is compared to the byte. Times are of a shared machine: the "
             "last column says how many cores other processes kept busy while the plan was rehearsed / while it was "
             "carried out. What misses its bound is bold.",
             "", "| calibration | planned | measured | off by | asked | others' cores |",
             "|---|---:|---:|---:|---:|---:|"]
    for cell in cells:
        if cell["unit"] == "cores":
            continue
        value, peer = float(str(cell["value"])), float(str(cell["peer"]))
        name = str(cell["name"]).removesuffix(" time")
        exact = cell["unit"] == "bytes"
        within = 0.0 if exact else TIME_WITHIN if cell["unit"] == "s" else MEMORY_WITHIN
        asked = "exact" if exact else f"{within:.0%}"
        off = f"{peer - value:+,.0f} bytes" if exact else f"{peer / value - 1:+.0%}"
        off = f"**{off}**" if abs(peer / value - 1) > within else off
        shown = f"{peer:,.0f} | {value:,.0f}" if exact else f"{peer:,.1f} {cell['unit']} | {value:,.1f} {cell['unit']}"
        beside = others.get(name, "") if cell["unit"] == "s" else ""
        lines.append(f"| {cell['name']} | {shown} | {off} | {asked} | {beside} |")
    return [*lines, ""]


_ABOUT = """# Plans

`toolkit plan MODEL --recipe R` says what `toolkit quantize` would do, before anything runs; config.json alone will do.
This page is written by `python -m benchmarks.plans`.

- **From what.** The headers of the weight files, or config.json alone; the first line says so. A folder that shows
  that it should hold weights (an index, some weight file, a tokenizer) and lacks them is refused, by name.
- **Coverage, groups, cuts.** Every matrix with its scheme, or the reason why it is left. `--tp N` chooses a group
  size that can still be cut over N devices, and refuses a cut through a group, a tile or a head, with what would
  fit.
- **Disk** is exact: names, dtypes and shapes of every tensor follow from the plan, and with them the files, headers
  and all (`calib/sizes.py`). With `protect` it is the least: layers that stay in 16 bits come on top, and which
  those are `quantize` measures.
- **Time and memory** are measured when `--rehearse` asks for it: the recipe is rehearsed on small random models in
  a fresh process, once for a recipe, its settings, this machine and these versions (`calib/rehearsal.py`; kept in
  home): seconds once, per layer, per weight and per element of the head. The machine's other work at that time is
  measured with it. How near that comes is what `python -m benchmarks.plans` measures. Without it memory is said
  beside the libraries' own, and no time.
- **Layer by layer.** Above `--memory` (60 % of what is free, when nothing is said) calibration goes one decoder
  layer at a time: the same checkpoint, bit for bit, in the memory of a layer and a shard (`calib/layerwise.py`). A
  killed run goes on at the layer where it was. The smoothing strength of `int8` is chosen by sending the choose
  text through all layers once per candidate. What lies in the work folder is hashed tensor by tensor; a damaged one
  is begun anew. `protect` and a quantized `lm_head` need the whole model; the plan
  says so.
- **Who loads it**, from which version, and by which source. This toolkit's row is the answer of its engine builder,
  asked with the model's config.json and every scheme of the plan: on which kind of device an engine runs the result,
  and why not on the other. Where none does, a warning says so here and before `quantize` begins; what is asked for an
  engine (`build`, `generate`, `serve`, `run`) is refused then, also for its limits, before anything is calibrated.
"""


def measure(asked: argparse.Namespace) -> list[BenchCell]:
    found: list[BenchCell] = []
    with tempfile.TemporaryDirectory(dir=asked.work) as folder:
        work = Path(folder)
        for shape in asked.shape:
            model = write_model(work / shape, SHAPES[shape], 2**30)
            calibration_set(model, work / f"{shape}-set", asked.rows, LENGTH)
            for recipe in asked.recipe:
                for mode in asked.mode:
                    found += cells_of(compare(model, work / f"{shape}-set", shape, recipe, mode, work, asked.rows))
                    print(table(found[-5:]), flush=True)
            shutil.rmtree(model)
    return found


def held_cells(path: Path, rows: int) -> list[BenchCell]:
    """The cells of ``path``, none where it is not there. Refused where they do not compare with this run's: ask before
    anything is measured."""
    if not path.is_file():
        return []
    held = json.loads(path.read_text())
    here = {"device": device_name(), "versions": installed_versions(), "commit": commit(), "rows": rows}
    for key, now in here.items():
        then = _rows_of(held["command"]) if key == "rows" else held[key]
        if then != now:
            raise SystemExit(f"{path} was measured with {key} {then}, and this run has {now}: such cells do not "
                             "compare. Measure all of them anew, into another file.")
    return [BenchCell.model_validate(cell) for cell in held["cells"]]


def merged(held: list[BenchCell], cells: list[BenchCell]) -> list[BenchCell]:
    """The held cells that were not measured anew, then the new ones."""
    names = {cell.name for cell in cells}
    return [cell for cell in held if cell.name not in names] + cells


def _rows_of(command: str) -> int:
    words = shlex.split(command)
    return int(words[words.index("--rows") + 1]) if "--rows" in words else ROWS


def command_of(names: Iterable[str], path: Path, rows: int) -> str:
    """The command line that measures all cells of ``path``: one call for shapes that have the same recipes and ways."""
    calls: dict[str, dict[str, list[str]]] = {}
    for name in names:
        shape, recipe, rest = name.split(" ", 2)
        mode = next(mode for mode, way in WAYS.items() if rest.startswith(f"{way} "))
        modes = calls.setdefault(shape, {}).setdefault(recipe, [])
        modes += [mode] if mode not in modes else []
    grids: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for shape, recipes in calls.items():
        for modes in sorted({tuple(sorted(found)) for found in recipes.values()}):
            same = tuple(recipe for recipe, found in recipes.items() if tuple(sorted(found)) == modes)
            grids.setdefault((same, modes), []).append(shape)
    place = path.name if path.is_absolute() else path.as_posix()
    lines = [["python", "-m", "benchmarks.plans", "--shape", *shapes, "--recipe", *recipes, "--mode", *modes,
              "--rows", str(rows), "--json", place] for (recipes, modes), shapes in grids.items()]
    return " && ".join(shlex.join([*line, *["--merge"][:number > 0]]) for number, line in enumerate(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=["small", "medium"])
    parser.add_argument("--recipe", nargs="+", default=["fp8", "int8", "int4_awq"])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--work", type=Path, help="folder for scratch [default: the system's temporary one]")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--merge", action="store_true")
    parser.add_argument("--doc", type=Path, help="write the page, with the cells of --json where it is given")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        model, calibration, recipe, out, mode = asked.one
        quantize(model, load_recipe(recipe), Path(out), calibration=CalibrationSet.open(calibration),
                 choose_texts=sentences(2, 60), layerwise=mode)
        return
    held = held_cells(asked.json, asked.rows) if asked.json and asked.merge and asked.shape else []
    cells = measure(asked) if asked.shape else []
    if asked.json and cells:
        kept = merged(held, cells)
        write_cells(asked.json, kept, command_of((cell.name for cell in kept), asked.json, asked.rows))
    if asked.doc:
        made: dict[str, Any] = json.loads(asked.json.read_text()) if asked.json else {"cells": [], "device": ""}
        asked.doc.write_text(document(made["cells"], made["device"], ["fp8", "int8", "int4_awq"]))


if __name__ == "__main__":
    main()
