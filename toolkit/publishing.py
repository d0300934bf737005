"""``publish`` for a user: find the evidence of an engine's verdict, write card and statement, release all together.

A part of the evidence that cannot be found any more is an error: a release without it could not be checked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.artifact import Artifact
from calib.errors import ArtifactError
from calib.progress import Report, silent
from engines.engine import Engine
from evals.report import EvalReport, LatencySweep, Row
from toolkit import hub, provenance
from toolkit.approving import Approved, approval_of, approve, verdict_for
from toolkit.audit import now
from toolkit.errors import ReleaseError
from toolkit.home import Home
from toolkit.release import Approval, Bundle, Release, ReleaseRecord, check_alias, publish
from toolkit.report import card
from toolkit.rows import make_row
from toolkit.signing import sign_statement
from toolkit.store import RunStore, StoredVerdict
from toolkit.target import Target, open_target
from toolkit.unpacking import unpack

PARTS = ("engine", "checkpoint")


@dataclass(frozen=True, slots=True)
class Wish:
    """How to release. ``reason``: approve the engine for this reason first; None: it must be approved already.
    ``override``: approve it without a PASS; ``key``: a private key that signs."""

    alias: str
    who: str
    reason: str | None = None
    policy_sha256: str | None = None
    override: bool = False
    parts: tuple[str, ...] = ("engine",)
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known about an engine that is to be released."""

    row: Row
    baseline: Row | None
    name: str
    licences: dict[str, str]
    facts: dict[str, Any]


def publish_engine(store: RunStore, path: Path, target: Target, wish: Wish, report: Report = silent) -> Release:
    """Release an engine with verdict, report, sweep, card and statement. ReleaseError when it is not approved."""
    _check(wish)
    engine = Engine.open(path)
    approved = _approval(store, engine.digest, wish)
    verdict = verdict_for(store, engine.digest, wish.policy_sha256, approved.override)
    evidence = _evidence(store, verdict) if verdict else {}
    found = _about(store, engine, evidence, verdict)
    approval = Approval(who=approved.who, at=approved.at, reason=approved.reason,
                        override=approved.reason if approved.override else None)
    record = ReleaseRecord(
        name=found.name, engine_digest=engine.digest, checkpoint_digest=engine.checkpoint_digest,
        verdict_digest=verdict.digest if verdict else None, verdict=verdict.verdict if verdict else None,
        row=found.row, licences=found.licences, parts=list(wish.parts), approval=approval,
        created=now(), publisher=wish.who)
    source = _source(store, engine)
    artifacts = {f"evidence/{kind}": artifact for kind, artifact in evidence.items()}
    if "engine" in wish.parts:
        artifacts["engine"] = engine.artifact
    if "checkpoint" in wish.parts:
        if source is None:
            raise ReleaseError(f"checkpoint {engine.checkpoint_digest[:12]} of this engine is not known here",
                               "Quantize it again, or release the engine alone.")
        artifacts["checkpoint"] = source
    judged = evidence.get("eval-report")
    texts = {"README.md": _card(record, found, engine, wish.alias), **provenance.eval_results(
        EvalReport.model_validate(judged.record) if judged else None, record.created)}
    made_from = {"quantized-checkpoint": engine.checkpoint_digest, **_made_from(store, source),
                 **{kind: artifact.digest for kind, artifact in evidence.items()}}
    bundle = Bundle(record, artifacts, texts, _statement(record, found, engine, made_from, wish.key))
    return publish(store, target, bundle, wish.alias, report)


def _check(wish: Wish) -> None:
    check_alias(wish.alias)
    if not wish.parts or set(wish.parts) - set(PARTS):
        raise ReleaseError(f"parts {', '.join(wish.parts) or 'none'} cannot be released",
                           f"Choose from: {', '.join(PARTS)}.")
    if wish.override and wish.reason is None:
        raise ReleaseError("an override needs a reason", "Say why it may go without a PASS: --reason TEXT.")


def _approval(store: RunStore, engine: str, wish: Wish) -> Approved:
    if wish.reason is None:
        return approval_of(store, engine, wish.policy_sha256)
    return approve(store, engine, wish.who, wish.reason, policy_sha256=wish.policy_sha256, override=wish.override)


def _evidence(store: RunStore, verdict: StoredVerdict) -> dict[str, Artifact]:
    """The verdict and the artifacts it was given on, by kind."""
    try:
        given = Artifact.open(verdict.path, "verdict")
        found = {"verdict": given}
        for digest in given.parents:
            place = store.resolve(digest)
            if place is None:
                raise ReleaseError(f"the evidence {digest[:12]} of the verdict is not known here", "Judge it again.")
            found[place[0]] = Artifact.open(place[1], place[0])
    except ArtifactError as error:
        raise ReleaseError(f"the evidence of the verdict is damaged: {error.message}", "Judge the engine again."
                           ) from error
    return found


def _source(store: RunStore, engine: Engine) -> Artifact | None:
    """The checkpoint that the engine was built from, if it is still where it was."""
    place = store.resolve(engine.checkpoint_digest)
    if place is None or not place[1].is_dir():
        return None
    return Artifact.open(place[1], "quantized-checkpoint")


def _made_from(store: RunStore, source: Artifact | None) -> dict[str, str]:
    """Kind -> digest of what the checkpoint itself was made from: its model and calibration set."""
    found = {}
    for number, digest in enumerate(source.parents if source else ()):
        place = store.resolve(digest)
        found[place[0] if place else f"checkpoint-parent-{number}"] = digest
    return found


def _about(store: RunStore, engine: Engine, evidence: Mapping[str, Artifact], verdict: StoredVerdict | None) -> _Found:
    """Row, baseline's row, name, licences and facts: of the engine's newest run, else from the evidence alone."""
    found = store.row_of_engine(engine.digest)
    if found is not None:
        run, stored = found
        others = [one.row for one in store.rows(run.id) if one.row.verdict == "BASELINE"]
        word, reason = (verdict.verdict.word, verdict.verdict.reason) if verdict else (None, None)
        row = stored.row.model_copy(update={"verdict": word, "verdict_reason": reason})
        return _Found(row, others[0] if others else None, str(run.facts["model"]), dict(run.facts["licences"]),
                      run.facts)
    report, sweep = evidence.get("eval-report"), evidence.get("latency-sweep")
    row = make_row(engine, EvalReport.model_validate(report.record) if report else None,
                   LatencySweep.model_validate(sweep.record) if sweep else None, verdict.verdict if verdict else None)
    return _Found(row, None, f"engine {engine.digest[:12]}", {}, {})


def _card(record: ReleaseRecord, found: _Found, engine: Engine, alias: str) -> str:
    limits = engine.plan.limits
    facts = [("sequences in one step", f"{limits.max_batch_size}"), ("tokens of one sequence", f"{limits.max_seq_len}"),
             ("tokens in one step", f"{limits.max_num_tokens}"), ("device", str(engine.plan.device))]
    calibration = found.facts.get("calibration")
    return card.render(record, found.baseline, facts, alias, engine.artifact.manifest.versions,
                       str(calibration) if calibration else None)


def _statement(record: ReleaseRecord, found: _Found, engine: Engine, made_from: Mapping[str, str], key: Path | None
               ) -> Callable[[Mapping[str, str], str], dict[str, bytes]]:
    """What ``release.publish`` calls with the hashes of all files and the head of the audit log."""
    dependencies = dict(made_from) | {name.removesuffix("_digest"): str(found.facts[name]) for name in
                                      ("model_digest", "evaluation_digest") if found.facts.get(name)}

    def say(files: Mapping[str, str], head: str) -> dict[str, bytes]:
        said = provenance.statement(record, files, head, engine.record.spec.model_dump(mode="json"), dependencies,
                                    engine.artifact.manifest.versions)
        written = provenance.as_files(said)
        return written | (sign_statement(written, key) if key else {})

    return say


def publish_anywhere(home: Home, store: RunStore, path: Path, to: str, wish: Wish, report: Report = silent
                     ) -> tuple[Release, str]:
    """Publish to a folder or URL; to the Hub by way of home's own target, whose copy is then pushed."""
    if not to.startswith(hub.PREFIX):
        target = open_target(to)
        return publish_engine(store, path, target, wish, report), target.name
    target = open_target(home.path / "releases")
    done = publish_engine(store, path, target, wish, report)
    with tempfile.TemporaryDirectory(dir=home.path) as folder:
        hub.push(hub.hub_api(), to, unpack(target, done, Path(folder) / "release", report), done, wish.alias, report)
    store.log("push", done.digest, alias=wish.alias, target=to, who=wish.who)
    return done, to
