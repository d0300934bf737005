"""``publish`` for a user: find the evidence of an engine's verdict, write the card, release all of it together."""

from __future__ import annotations

from pathlib import Path

from calib.artifact import Artifact
from calib.errors import ArtifactError
from calib.progress import Report, silent
from engines.engine import Engine
from evals.report import EvalReport, LatencySweep, Row, Verdict
from toolkit.errors import ReleaseError
from toolkit.release import Release, passing_verdict, publish
from toolkit.report import card
from toolkit.rows import make_row
from toolkit.store import RunStore, StoredVerdict


def publish_engine(store: RunStore, path: Path, target: Path, alias: str, *, policy_sha256: str | None = None,
                   report: Report = silent) -> Release:
    """Release an engine with its verdict, report, sweep and card. ReleaseError without a PASS for exactly this engine.

    A part of the evidence that cannot be found any more is an error: a release without it could not be checked.
    """
    engine = Engine.open(path)
    verdict = passing_verdict(store, engine.digest, policy_sha256)
    evidence = _evidence(store, verdict)
    row, baseline, name, licences = _row(store, engine, evidence, verdict.verdict)
    limits = engine.plan.limits
    facts = [("sequences in one step", f"{limits.max_batch_size}"), ("tokens of one sequence", f"{limits.max_seq_len}"),
             ("tokens in one step", f"{limits.max_num_tokens}"), ("device", str(engine.plan.device))]
    text = card.render(name, row, verdict.verdict, baseline, licences, facts, alias,
                       engine.artifact.manifest.versions)
    return publish(store, engine.path, target, alias, evidence=evidence, row=row, card=text, name=name,
                   licences=licences, policy_sha256=policy_sha256, report=report)


def _evidence(store: RunStore, verdict: StoredVerdict) -> dict[str, Artifact]:
    """The artifacts a verdict was given on, by kind."""
    found = {}
    try:
        for digest in Artifact.open(verdict.path, "verdict").parents:
            place = store.resolve(digest)
            if place is None:
                raise ReleaseError(f"the evidence {digest[:12]} of the verdict is not known here", "Judge it again.")
            found[place[0]] = Artifact.open(place[1], place[0])
    except ArtifactError as error:
        raise ReleaseError(f"the evidence of the verdict is damaged: {error.message}", "Judge the engine again."
                           ) from error
    return found


def _row(store: RunStore, engine: Engine, evidence: dict[str, Artifact], verdict: Verdict
         ) -> tuple[Row, Row | None, str, dict[str, str]]:
    """(row, baseline's row, name, licences): of the engine's newest run, else from the evidence alone."""
    found = store.row_of_engine(engine.digest)
    if found is not None and found[1].row.verdict == "PASS":
        run, stored = found
        others = [one.row for one in store.rows(run.id) if one.row.verdict == "BASELINE"]
        return stored.row, (others[0] if others else None), str(run.facts["model"]), dict(run.facts["licences"])
    sweep = evidence.get("latency-sweep")
    row = make_row(engine, EvalReport.model_validate(evidence["eval-report"].record),
                   LatencySweep.model_validate(sweep.record) if sweep else None, verdict)
    return row, None, f"engine {engine.digest[:12]}", {}
