"""What a recipe costs on this machine: measured by calibrating small random models, and kept.

A laptop and a server differ by a hundred, and a recipe's cost is no formula (a search multiplies every weight once per
candidate and batch, a rounding is memory bound, a product is not). So the stage itself is run, in a fresh process, with
the recipe, rows and length that are planned, on four small Llamas: of one layer, of four, of four narrow ones, and of
one layer with a large vocabulary. Three differences between them give

    seconds = fixed + per_layer * layers + per_weight * weights of all layers + per_head * vocabulary * hidden

A layer's own cost (building it, its quantizers, its files) must not be taken for its weights': layer by layer that is
a good part of a small layer's time, and would be multiplied by thirty for the layers of an 8B model. The first run's
excess over the second is what a process pays once (imports, first calls). The peak of anonymous memory,
less what ``calib/estimates.py`` says of so small a model, is what the libraries take. What a recipe keeps in bf16 is
counted as if it were quantized; for ``protect``, whose cost grows with the square of the layers, no time is said. The
result is kept under a key of everything it depends on: recipe, sizes, processor, threads, package versions and this
package's sources.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from calib.artifact import Artifact, canonical_json, installed_versions, sha256_hex
from calib.calibrate import quantize
from calib.errors import ENVIRONMENT, CalibError
from calib.estimates import working_bytes
from calib.kept import read_kept, write_kept
from calib.plan import CalibrationPlan, make_plan
from calib.random_model import Shape, calibration_set, sentences, write_model
from calib.recipe import Recipe
from calib.scheme import Frozen

#: What runs in the fresh process.
MODULE = "calib.rehearsal"


class RehearsalError(CalibError):
    """The small calibration failed."""

    code = "rehearsal"
    exit_code = ENVIRONMENT


class Rehearsal(Frozen):
    """Seconds once, per layer, per weight of a layer and per element of the head; bytes that the libraries take."""

    fixed: float
    per_layer: float
    per_weight: float
    per_head: float
    base_bytes: int
    took: float


_ONE = Shape(hidden=768, inter=2048, layers=1, heads=12, kv_heads=4, vocab=512)
SHAPES = {"one": _ONE, "four": replace(_ONE, layers=4), "wide": replace(_ONE, vocab=8192),
          "narrow": replace(_ONE, hidden=256, inter=512, heads=4, layers=4)}


def estimate(plan: CalibrationPlan, rows: int, length: int, cache: Path | None = None) -> CalibrationPlan:
    """The plan with ``seconds`` and ``memory_bytes`` as this machine needs them. ``cache``: folder of rehearsals."""
    rows = min(rows, plan.recipe.rows)
    found = rehearsal_of(plan, rows, length, cache)
    head = next((module.shape for module in plan.modules if module.name == "lm_head"), (0, 0))
    weights = sum(module.shape[0] * module.shape[1] for module in plan.modules if ".layers." in module.name)
    seconds = (found.fixed + found.per_layer * plan.num_layers + found.per_weight * weights
               + found.per_head * head[0] * head[1])
    recipe = plan.recipe.model_copy(update={"rows": rows})
    memory = found.base_bytes + working_bytes(plan.sizes, recipe, length, layerwise=plan.layerwise)
    return plan.model_copy(update={"seconds": None if plan.recipe.protect else round(seconds, 1),
                                   "memory_bytes": memory})


def _asked(plan: CalibrationPlan, rows: int, length: int) -> dict[str, Any]:
    """What is rehearsed: the recipe on every module, whatever it keeps, raises or protects of the planned model."""
    recipe = plan.recipe.model_copy(update={"keep": (), "raised": {}, "protect": 0})
    return {"recipe": recipe.model_dump(mode="json"), "kv": _kv_name(plan), "rows": rows, "length": length,
            "layerwise": plan.layerwise}


def kept_at(plan: CalibrationPlan, rows: int, length: int, cache: Path) -> tuple[Path, str]:
    """Where the rehearsal of a plan is kept, and the key that names everything that it depends on."""
    key = sha256_hex(canonical_json({**_asked(plan, rows, length), "machine": _machine(),
                                     "versions": installed_versions(), "sources": _sources()}))
    return cache / f"{key[:24]}.json", key


def rehearsal_of(plan: CalibrationPlan, rows: int, length: int, cache: Path | None) -> Rehearsal:
    """Found in ``cache``, or made now (some seconds). RehearsalError when it cannot be made."""
    kept = None if cache is None else kept_at(plan, rows, length, cache)
    if kept is not None and (values := read_kept(*kept)):
        return Rehearsal.model_validate(values)
    done = subprocess.run([sys.executable, "-m", MODULE, canonical_json(_asked(plan, rows, length)).decode()],
                          text=True, capture_output=True, cwd=Path(__file__).resolve().parent.parent)
    if done.returncode:
        last = " ".join(done.stderr.strip().splitlines()[-2:]) or "no message"
        raise RehearsalError(f"the rehearsal of {plan.recipe.name} failed: {last}", "Plan with --no-rehearse.")
    found = Rehearsal.model_validate_json(done.stdout.splitlines()[-1])
    if kept is not None:
        write_kept(*kept, found.model_dump())
    return found


def _kv_name(plan: CalibrationPlan) -> str:
    return "fp8" if plan.kv.dtype == "fp8_e4m3" else plan.kv.dtype


def _machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {"processor": name, "threads": torch.get_num_threads()}


@functools.cache
def _sources() -> str:
    root = Path(__file__).parent
    return sha256_hex(b"".join(path.read_bytes() for path in sorted(root.rglob("*.py"))))


def _rehearse(recipe: Recipe, kv: Any, rows: int, length: int, layerwise: bool) -> Rehearsal:
    """The measurement itself, in this process, which should be fresh."""
    began = time.perf_counter()
    mode: Literal["on", "off"] = "on" if layerwise else "off"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        models = {name: write_model(work / name, shape, 2**30) for name, shape in SHAPES.items()}
        sets = {name: calibration_set(model, work / f"{name}-set", rows, length) for name, model in models.items()}
        times: list[float] = []
        peak = 0
        for index, name in enumerate(("one", "one", "four", "wide", "narrow")):
            start = time.perf_counter()
            made = quantize(models[name], recipe, work / f"out-{index}", kv_cache=kv, calibration=sets[name],
                            choose_texts=sentences(2, 60), layerwise=mode)
            times.append(time.perf_counter() - start)
            if index == 1 and isinstance(made.artifact, Artifact):
                peak = json.loads(made.artifact.file("calibration.json").read_text())["peak_anonymous_bytes"] or 0
        sizes = make_plan(models["one"], recipe, kv).sizes
    working = working_bytes(sizes, recipe.model_copy(update={"rows": rows}), length, layerwise=layerwise)
    base = max(0, peak - working)
    return Rehearsal(**_costs(*times), base_bytes=base, took=round(time.perf_counter() - began, 2))


def _costs(first: float, one: float, four: float, wide: float, narrow: float) -> dict[str, float]:
    """The four costs from the seconds of the five runs. A difference that came out negative is noise: no cost."""
    of, slim = SHAPES["one"], SHAPES["narrow"]
    head, slim_head = of.vocab * of.hidden, slim.vocab * slim.hidden
    per_head = max(0.0, wide - one) / (SHAPES["wide"].vocab * of.hidden - head)
    layer = max(0.0, four - one) / 3  # of this width, its own cost and its weights'
    shrunk = max(0.0, four - narrow - per_head * (head - slim_head)) / 4
    per_weight = shrunk / (of.layer_parameters - slim.layer_parameters)
    per_layer = max(0.0, layer - per_weight * of.layer_parameters)
    per_weight = (layer - per_layer) / of.layer_parameters
    return {"fixed": max(0.0, first - layer - per_head * head), "per_layer": per_layer, "per_weight": per_weight,
            "per_head": per_head}


def main() -> None:
    parser = argparse.ArgumentParser(description="One rehearsal, asked for as JSON; prints it as JSON.")
    parser.add_argument("asked")
    asked = json.loads(parser.parse_args().asked)
    found = _rehearse(Recipe.model_validate(asked["recipe"]), asked["kv"], asked["rows"], asked["length"],
                      asked["layerwise"])
    print(found.model_dump_json())


if __name__ == "__main__":
    main()
