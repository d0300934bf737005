"""What lies behind a row: the engine's plan and timings, the judgement item by item, the questions in words.

A row of the store holds figures; this finds the artifacts they came from, by digest, and reads their records as plain
JSON, without opening an engine (which needs its device and torch). An artifact that was moved or deleted is None: a
page says so instead of failing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from calib.artifact import Artifact
from calib.errors import ArtifactError, ToolkitError
from evals.data import EvalData
from evals.items import Asked
from evals.report import EvalReport, LatencySweep, Row
from toolkit.home import Home
from toolkit.store import Run, RunStore


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine's own record, as JSON. ``timings``: what tuning measured, if that was kept."""

    digest: str
    path: Path
    plan: dict[str, Any]
    spec: dict[str, Any]
    parents: list[str]
    created: str
    versions: dict[str, str]
    timings: dict[str, Any]
    size_bytes: int


def engine_view(store: RunStore, digest: str) -> EngineView | None:
    artifact = _artifact(store, digest, "engine")
    if artifact is None:
        return None
    record, timings = artifact.record, {}
    if "timings.json" in artifact.manifest.files:
        timings = json.loads(artifact.file("timings.json").read_text(encoding="utf-8"))
    return EngineView(digest, artifact.path, record["plan"], record["spec"], artifact.parents,
                      artifact.manifest.created, artifact.manifest.versions, timings, artifact.size_bytes)


def _artifact(store: RunStore, digest: str, kind: str) -> Artifact | None:
    found = store.resolve(digest)
    try:
        return Artifact.open(found[1], kind) if found else None
    except ArtifactError:
        return None


def report_of(store: RunStore, row: Row, run: Run) -> EvalReport | None:
    """The judgement of a row's engine on the run's data, the newest one."""
    for path in store.children(row.engine_digest, "eval-report"):
        report = _record(path, "eval-report", EvalReport)
        if report is not None and run.facts.get("evaluation_digest") in (None, report.data_digest):
            return report
    return None


def baseline_of(store: RunStore, report: EvalReport) -> EvalReport | None:
    """The judgement of the unquantized model that a report was compared with."""
    artifact = _artifact(store, report.baseline_digest, "baseline") if report.baseline_digest else None
    try:
        return EvalReport.model_validate(artifact.record["report"]) if artifact else None
    except (ValidationError, KeyError):
        return None


def _record(path: Path, kind: str, record: Any) -> Any:
    try:
        return record.model_validate(Artifact.open(path, kind).record)
    except (ArtifactError, ValidationError):
        return None


def questions(home: Home, digest: str) -> dict[str, Asked]:
    """Item id -> question, of the prepared data with this digest; empty where it is not in home any more."""
    for folder in sorted(path.parent for path in home.data.glob("**/manifest.json")):
        try:
            data = EvalData.load(folder)
        except ToolkitError:
            continue
        if data.digest == digest:
            return {item.id: item for item in data.items}
    return {}


def endpoint_sweeps(store: RunStore, limit: int = 50) -> list[LatencySweep]:
    """The newest sweeps of endpoints (closed and open loops), which stand beside a run's own engines."""
    found = [_record(path, "latency-sweep", LatencySweep) for path in store.artifacts("latency-sweep", limit)]
    return [sweep for sweep in found if sweep and any(cell.mode != "batch" for cell in sweep.cells)]


@dataclass(frozen=True, slots=True)
class Link:
    """One step of where an engine comes from. ``found``: its artifact is still where it was."""

    what: str
    name: str
    digest: str
    found: bool


def chain(store: RunStore, run: Run, row: Row) -> list[Link]:
    """Model -> data -> recipe -> checkpoint -> engine -> evidence, in the order in which they came about."""
    facts = run.facts
    links = [Link("model", str(facts.get("model", "")), str(facts.get("model_digest", "")), True),
             Link("calibration data", str(facts.get("calibration", "")), "", True),
             Link("recipe", f"{row.recipe}, KV cache {row.kv_cache}", "", True)]
    for what, digest, kind in (("checkpoint", row.checkpoint_digest, "quantized-checkpoint"),
                               ("engine", row.engine_digest, "engine")):
        place = store.resolve(digest)
        links.append(Link(what, place[1].name if place else kind, digest, bool(place and place[1].is_dir())))
    for kind in ("eval-report", "latency-sweep"):
        for path in store.children(row.engine_digest, kind)[:1]:
            artifact = _open(path)
            links.append(Link(kind.replace("-", " "), path.name, artifact.digest if artifact else "",
                              artifact is not None))
    verdict = store.verdict_of(row.engine_digest, facts.get("policy_sha256"))
    if verdict is not None:
        links.append(Link("verdict", f"{verdict.verdict.word} under {verdict.verdict.policy}", verdict.digest,
                          verdict.path.is_dir()))
    return links


def _open(path: Path) -> Artifact | None:
    try:
        return Artifact.open(path)
    except ArtifactError:
        return None
