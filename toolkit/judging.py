"""Judging outside a job: ``eval`` and ``gate`` for any REF, with data from home or from the user's own file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.artifact import Artifact
from toolkit import making, stages
from toolkit.errors import UsageError
from toolkit.refs import Ref, resolve
from toolkit.stages import Workshop

if TYPE_CHECKING:
    from evals.data import EvalData
    from evals.fidelity import Baseline, EvalSettings
    from evals.report import EvalReport

JUDGED = ("eval-report", "engine", "quantized-checkpoint", "model")


def user_data(shop: Workshop, path: Path, kind: str) -> EvalData:
    """A user's JSONL as evaluation data: ``text`` lines {"text"}, ``choice`` lines {"question", "choices", "answer"}.

    Kept in home under the file's hash, so that its items have the same ids every time.
    """
    from calib.artifact import sha256_hex
    from evals.data import EvalData, Source, write_folder

    if not path.is_file():
        raise UsageError(f"there is no file {path}", "Give a JSONL file with --data.")
    content = path.read_bytes()
    place = shop.home.data / "own" / f"{kind}-{sha256_hex(content)[:16]}"
    if (place / "manifest.json").is_file():
        return EvalData.load(place)
    rows = [_row(path, number, line) for number, line in enumerate(content.decode().splitlines(), 1) if line.strip()]
    if kind == "text":
        rows = [{"document": f"{path.name}:{number}", **row} for number, row in enumerate(rows, 1)]
    return write_folder(place, {"texts" if kind == "text" else "own": Source(rows, path.name, "the user's own")})


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} line {number} is not JSON: {error.msg}", "One JSON object a line.") from error
    if not isinstance(row, dict):
        raise UsageError(f"{path} line {number} is not an object", "One JSON object a line.")
    return row


def settings_for(data: EvalData, texts: int, items: int, tasks: list[str] | None, seed: int) -> EvalSettings:
    """Settings that the data can give: never more texts or questions than there are."""
    from evals.fidelity import EvalSettings

    chosen = data.tasks if tasks is None else tasks
    for task in chosen:
        data.task(task)
    return EvalSettings(tasks=tuple(chosen), limit_items=items,
                        limit_texts=min(texts, len(data.texts)) if data.texts else None, seed=seed)


def baseline_of(shop: Workshop, name: str, data: EvalData, settings: EvalSettings) -> Baseline:
    """The baseline a REF is, or the one made by judging the model, checkpoint or engine it is."""
    from calib.checkpoint import QuantizedCheckpoint
    from engines.engine import Engine
    from evals.fidelity import Baseline

    ref = resolve(name, shop.home, shop.store, offline=shop.offline)
    if ref.kind == "baseline":
        return Baseline.open(ref.path)
    ref.of_kind("model", "quantized-checkpoint", "engine")
    if ref.kind == "engine":
        return stages.baseline(shop, Engine.open(ref.path), data, settings)
    path = making.model_folder(shop, ref) if ref.kind == "model" else ref.path
    return stages.baseline(shop, QuantizedCheckpoint.open(path), data, settings)


def report_of(shop: Workshop, ref: Ref, data: EvalData, settings: EvalSettings, against: Baseline
              ) -> tuple[EvalReport, Artifact]:
    """The report a REF is, or the one made by judging the engine it is (or becomes)."""
    from evals.records import load_record
    from evals.report import EvalReport

    if ref.kind == "eval-report":
        return load_record(ref.path, EvalReport), Artifact.open(ref.path)
    engine = making.engine_of(shop, ref.name)
    return stages.evaluation(shop, engine, data, against, settings, engine.recipe)
