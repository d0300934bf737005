"""The stage as a story: plan, load, find scales, look at the result, write it, prove it.

Nothing half-written is ever left: the checkpoint grows in a hidden sibling and is renamed when it is whole and has been
read back. What was measured on the way (a loss for each candidate) is kept in another sibling, as JSON, so a killed run
goes on; the choice, and with it the digest, comes out the same.
"""

from __future__ import annotations

import json
import resource
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calib.artifact import canonical_json, installed_versions, sha256_hex
from calib.artifact_writer import ArtifactWriter
from calib.checkpoint import FORMAT, KIND, QuantizedCheckpoint
from calib.choices import KvChoice
from calib.config import positions
from calib.dataset import CalibrationSet, refuse_overlap
from calib.errors import CalibrationDataError
from calib.foresee import check_memory, foresee
from calib.head import check_tied
from calib.peak import AnonymousPeak
from calib.plan import CalibrationPlan, LayerwiseChoice
from calib.progress import Progress, Report, silent
from calib.recipe import Recipe
from calib.sanity import plain_row
from calib.stage import Inspect, Memory, Outcome, Stage


def quantize(model: str | Path, recipe: Recipe, out: Path, *, kv_cache: KvChoice = "bf16",
             calibration: CalibrationSet | None = None, choose_texts: Sequence[str] = (), report: Report = silent,
             inspect: Inspect | None = None, resume: bool = True, seed: int = 0, offline: bool = False,
             measured: Path | None = None, layerwise: LayerwiseChoice = "auto", memory: int | None = None,
             tp: int = 1) -> QuantizedCheckpoint:
    """Calibrate ``model`` by ``recipe`` and write a validated checkpoint to ``out`` (which must not exist).

    ``calibration`` and ``choose_texts`` are what a recipe that needs data works with; one that needs none
    (``Recipe.needs_data``) reads neither, and its checkpoint is the same with and without them.
    ``choose_texts`` are for measured choices (smoothing strength, protected layers) and must overlap neither
    calibration nor evaluation. ``inspect`` is called once with the finished model in memory: fake-quantized, exactly
    what was written. Losses of candidates are kept until the checkpoint is whole, or, in the folder ``measured``, for
    every later call that would measure the same (a KV cache on another grid is no difference: it is off while choices
    are made). Where the whole pass would work in more than ``memory`` bytes (by default a share of what is free), or
    where ``layerwise`` is "on", calibration goes layer by layer (``calib/layerwise.py``): the same checkpoint, bit for
    bit. ``tp``: devices that groups must still be cut over. ``resume`` False forgets what an earlier, killed run did.
    ``seed``, added to the recipe's own, picks the calibration rows where the set has more than the recipe uses; a set
    of fewer is used whole, and who builds it draws its texts by that sum. The record's ``seed`` is the one that chose
    the rows, null where there are none: a seed without effect leaves the digest alone. The same inputs on the same kind
    of machine give the same digest. Errors: those of ``make_plan``, CalibrationDataError, SanityError, CoverageError,
    DiskSpaceError, ArtifactError; each names the module or file.
    """
    started = time.monotonic()
    if not recipe.needs_data(kv_cache):
        calibration, choose_texts = None, ()
    elif calibration is None:
        raise CalibrationDataError(f"recipe {recipe.name} with a {kv_cache} KV cache is calibrated on text, and there "
                                   "is none", "Give a CalibrationSet, or choose a recipe that needs no data.")
    given = {} if calibration is None else {"length": calibration.tokens.shape[1]}
    plan, source = foresee(model, recipe, kv_cache, out=Path(out), offline=offline, tp=tp, layerwise=layerwise,
                           memory=memory, **given)
    check_tied(source.config, ((name, source.shards.load(name)) for name in source.shards))
    if warning := check_memory(plan, asked=memory is not None):
        report(Progress("memory is short", 0, None, "byte", warning))
    tokenizer = source.tokenizer()
    if calibration is None:
        batches = [plain_row(tokenizer, positions(source.config))]
    else:
        calibration.check_tokenizer(tokenizer)
        refuse_overlap(calibration, choose_texts, "calibration and choose texts")
        batches = calibration.batches(recipe.rows, recipe.seed + seed)
    parents = [] if calibration is None else [calibration.digest]
    with ArtifactWriter(Path(out), KIND, FORMAT, parents=parents) as writer:
        work = writer.path.with_name(f".{writer.path.name}.work")
        drawn_by = _seed_of_rows(recipe, calibration, seed)
        key = _inputs_key(plan, source, calibration, choose_texts, drawn_by)
        losses = Memory(work / "losses.json" if measured is None else measured / f"{key[:16]}.json", key)
        if resume:
            losses.load()
        else:
            shutil.rmtree(work, ignore_errors=True)
        stage = Stage(plan, source, tokenizer, batches, tuple(choose_texts), report, inspect, losses, work,
                      f"{key} {plan.kv}")
        with AnonymousPeak() as peak:
            outcome = stage.run(writer.folder)
        writer.record = _record(plan, source, calibration, outcome, drawn_by)
        outcome.evidence |= {"seconds": round(time.monotonic() - started, 2), "model": str(model),
                             "losses": losses.losses, "versions": installed_versions(),
                             "layerwise": plan.layerwise, "peak_anonymous_bytes": peak.bytes,
                             "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        writer.evidence("calibration.json").write_bytes(json.dumps(outcome.evidence, indent=1).encode())
        report(Progress("write", 1, 1, "checkpoint"))
    shutil.rmtree(work, ignore_errors=True)
    return QuantizedCheckpoint.open(writer.path)


def _seed_of_rows(recipe: Recipe, calibration: CalibrationSet | None, seed: int) -> int | None:
    """The seed that chose the rows: that of the draw from a set, or the set's own where all of it is used."""
    if calibration is None:
        return None
    return recipe.seed + seed if calibration.rows > recipe.rows else int(calibration.artifact.record["seed"])


def _inputs_key(plan: CalibrationPlan, source: QuantizedCheckpoint, calibration: CalibrationSet | None,
                choose_texts: Sequence[str], seed: int | None) -> str:
    return sha256_hex(canonical_json({
        "recipe": plan.recipe.model_dump(mode="json"), "source": source.digest,
        "calibration": None if calibration is None else calibration.digest,
        "choose": [sha256_hex(text.encode()) for text in choose_texts],
        "seed": seed, "versions": installed_versions()}))


def _record(plan: CalibrationPlan, source: QuantizedCheckpoint, calibration: CalibrationSet | None, outcome: Outcome,
            seed: int | None) -> dict[str, Any]:
    data = (None, 0) if calibration is None else (calibration.digest, min(plan.recipe.rows, calibration.rows))
    counts: dict[str, int] = {}
    for scheme in outcome.schemes.values():
        counts[str(scheme)] = counts.get(str(scheme), 0) + 1
    return {"recipe": plan.recipe.name, "recipe_content": plan.recipe.model_dump(mode="json"),
            "kv": plan.kv.model_dump(mode="json"), "layout": plan.layout, "group_size": plan.group_size,
            "architecture": plan.architecture, "schemes": counts, "unquantized": _unquantized(plan, outcome),
            "source": source.digest, "source_grid": plan.source_grid, "calibration": data[0],
            "calibration_rows": data[1], "seed": seed, **outcome.record}


def _unquantized(plan: CalibrationPlan, outcome: Outcome) -> dict[str, str]:
    protected = {name: "protected: its loss in low precision was among the largest" for name in plan.schemes
                 if name not in outcome.schemes}
    return dict(sorted({**plan.left, **protected}.items()))


