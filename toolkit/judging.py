"""Judging outside a job: ``eval`` and ``gate`` for any REF, with data from home or from the user's own file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.artifact import Artifact
from calib.json_text import parse_object
from toolkit import making, stages
from toolkit.errors import UsageError
from toolkit.refs import ENGINES, Ref, resolve
from toolkit.stages import Workshop

if TYPE_CHECKING:
    from engines.engine import Engine
    from evals.data import EvalData
    from evals.fidelity import Baseline, EvalSettings
    from evals.report import EvalReport

JUDGED = ("eval-report", *ENGINES, "quantized-checkpoint", "model")


def user_data(shop: Workshop, path: Path, kind: str) -> EvalData:
    """A user's JSONL as evaluation data: ``text`` lines {"text"}, ``choice`` lines {"question", "choices", "answer"},
    ``exact`` lines {"question", "answer": text}.

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
    rows = [parse_object(line, f"{path} line {number}", UsageError, "One JSON object a line.")
            for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    if not rows:
        raise UsageError(f"{path} holds no examples", "One JSON object a line.")
    if wrong := next((n for n, row in enumerate(rows, 1) if _kind_of(row) != kind), None):
        has = ", ".join(sorted(rows[wrong - 1]))
        raise UsageError(f"example {wrong} of {path} is not of kind {kind}: it has {has}", _SHAPES[kind])
    if kind == "text":
        rows = [{"document": f"{path.name}:{number}", **row} for number, row in enumerate(rows, 1)]
    return write_folder(place, {"texts" if kind == "text" else "own": Source(rows, path.name, "the user's own")})


_SHAPES = {"text": 'A line is {"text": ...}.', "choice": 'A line is {"question", "choices": [...], "answer": index}.',
           "exact": 'A line is {"question", "answer": "..."}.'}


def _kind_of(row: dict[str, Any]) -> str | None:
    if "text" in row:
        return "text"
    if "question" not in row:
        return None
    return "choice" if "choices" in row else "exact"


def refuse_calibrated(shop: Workshop, engine: Engine, data: EvalData) -> None:
    """EvalData that shares text with what this engine was calibrated on is refused; an unknown calibration is noted."""
    from calib.artifact import Artifact as Opened
    from calib.dataset import CalibrationSet, refuse_overlap
    from calib.progress import Progress
    from evals.items import texts_of

    source = shop.store.resolve(engine.checkpoint_digest)
    if source is None or not source[1].is_dir():
        return
    parents = Opened.open(source[1]).parents if source[0] == "quantized-checkpoint" else []
    for parent in parents:
        found = shop.store.resolve(parent)
        if found is None or not found[1].is_dir():
            shop.report(Progress("overlap with calibration not checked", 0, None, "set", f"{parent[:12]} is not here"))
        elif found[0] == "calibration-set":
            refuse_overlap(CalibrationSet.open(found[1]), texts_of([*data.texts, *data.items]),
                           "calibration and evaluation")


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
    from evals.fidelity import Baseline

    ref = resolve(name, shop.home, shop.store, offline=shop.offline)
    if ref.kind == "baseline":
        return Baseline.open(ref.path)
    ref.of_kind("model", "quantized-checkpoint", *ENGINES)
    if ref.kind in ENGINES:
        return stages.baseline(shop, making.engine_of(shop, name), data, settings)
    path = making.model_folder(shop, ref) if ref.kind == "model" else ref.path
    return stages.baseline(shop, QuantizedCheckpoint.open(path), data, settings)


def stored_report(shop: Workshop, name: str) -> EvalReport | None:
    """The report a baseline's REF is, if it is one: judged here earlier, or brought in from another harness."""
    ref = resolve(name, shop.home, shop.store, offline=shop.offline)
    return open_report(ref)[0] if ref.kind == "eval-report" else None


def open_report(ref: Ref) -> tuple[EvalReport, Artifact]:
    from evals.records import load_record
    from evals.report import EvalReport

    return load_record(ref.path, EvalReport), Artifact.open(ref.path)


def report_of(shop: Workshop, ref: Ref, data: EvalData, settings: EvalSettings, against: Baseline | None
              ) -> tuple[EvalReport, Artifact]:
    """The report a REF is, or the one made by judging the engine it is (or becomes)."""
    if ref.kind == "eval-report":
        return open_report(ref)
    engine = making.engine_of(shop, ref.name)
    return stages.evaluation(shop, engine, data, against, settings, engine.recipe)
