"""``gate`` step by step: a verdict, a reference kept or changed, the noise of a machine, the speed of two engines."""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.artifact import Artifact
from calib.progress import Progress
from toolkit import judging, making, stages
from toolkit.console import duration
from toolkit.errors import UsageError
from toolkit.evaluating import data_of
from toolkit.options import check_cells
from toolkit.refs import Ref, resolve
from toolkit.stages import Workshop

if TYPE_CHECKING:
    from evals.data import EvalData
    from evals.draw import Draw
    from evals.fidelity import EvalSettings
    from evals.policy import LengthRule, Policy
    from evals.reference import Asked, Reference
    from evals.report import EvalReport, LatencySweep, Verdict
    from evals.speed_gate import SpeedVerdict

TEXTS, ITEMS = 64, 200


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict with what it was made of. ``questions``: text of each question by item id.

    ``draw`` and ``more``: of an INCONCLUSIVE verdict, the next look and that look in words, or why there is none.
    """

    verdict: Verdict
    artifact: Artifact
    report: EvalReport
    baseline: EvalReport
    questions: dict[str, str]
    more: str | None = None
    draw: Draw | None = None


def asked_of(baseline: str, data: str | None, kind: str | None, tasks: list[str] | None, texts: int | None,
             items: int | None, seed: int | None, length: LengthRule | None) -> Asked:
    """What is judged: the options given, the defaults otherwise, and as many continuations as the length rule needs."""
    from evals.fidelity import EvalSettings
    from evals.reference import Asked

    plain = stages.with_length(EvalSettings(), length)
    return Asked(baseline=baseline, data=data or "evaluation", kind=kind, tasks=tuple(tasks) if tasks else None,
                 texts=texts or TEXTS, items=items or ITEMS, seed=seed or 0, samples=plain.samples,
                 sample_tokens=plain.sample_tokens)


def settings_of(data: EvalData, asked: Asked) -> EvalSettings:
    plain = judging.settings_for(data, asked.texts, asked.items, list(asked.tasks) if asked.tasks else None, asked.seed)
    return plain.model_copy(update={"samples": asked.samples, "sample_tokens": asked.sample_tokens})


def decide(shop: Workshop, candidate: str, asked: Asked, policy: Policy, *, reference: Reference | None = None,
           sweep: str | None = None, candidates: int = 1, extend: bool = False) -> Outcome:
    """Judge a candidate against a baseline; with a ``reference``, a baseline that is not what it says is refused.

    ``extend``: while the verdict is INCONCLUSIVE and the data holds more, both answer up to the next look; what was
    answered is kept, so a killed gate goes on.
    """
    ref = resolve(candidate, shop.home, shop.store, offline=shop.offline).of_kind(*judging.JUDGED)
    speed, speed_artifact = _measured(shop, sweep)
    stored = judging.stored_report(shop, asked.baseline)
    data = None if stored is not None and ref.kind == "eval-report" else data_of(shop, asked.data, asked.kind)
    kinds = ref.kind, resolve(asked.baseline, shop.home, shop.store, offline=shop.offline).kind
    fixed = not {"eval-report", "baseline"}.isdisjoint(kinds)
    first = asked.texts
    while True:
        began = time.time()
        report, artifact, baseline = _reports(shop, ref, asked, data, stored, reference)
        verdict, kept = stages.verdict(shop, report, artifact, baseline, policy, speed, speed_artifact, "gate",
                                       candidates)
        draw = None if fixed or data is None else _draw(verdict, baseline, policy, asked, first, data)
        if draw is None:
            break
        words = f"{draw.why}{_estimate(draw, report, artifact, began)}"
        if not extend:
            break
        shop.report(Progress("gate draws more", 0, None, "item", words))
        asked = asked.model_copy(update={"texts": draw.texts, "items": draw.items})
    more = None if verdict.word != "INCONCLUSIVE" else words if draw else _why_none(verdict, baseline, policy, fixed)
    return Outcome(verdict, kept, report, baseline, {item.id: item.question for item in data.items} if data else {},
                   more, draw)


def _why_none(verdict: Verdict, baseline: EvalReport, policy: Policy, fixed: bool) -> str:
    from evals.draw import DRAWN
    from evals.gate import able_tasks

    if fixed:
        return "a stored report answers no more: judge both again on more questions, or gate the engine itself"
    if still := [reason.check for reason in verdict.reasons
                 if reason.word == "INCONCLUSIVE" and reason.check not in DRAWN]:
        return f"more questions do not decide {', '.join(still)}"
    if policy.accuracy is not None and not able_tasks(baseline, policy.accuracy):
        return "the baseline does not clearly beat chance: give questions that it can answer with --data or --task"
    return "the data reaches no further look: give a larger folder with --data"


def _draw(verdict: Verdict, baseline: EvalReport, policy: Policy, asked: Asked, first: int, data: EvalData
          ) -> Draw | None:
    from evals.draw import next_draw

    sizes = {task: len(data.task(task)) for task in (data.tasks if asked.tasks is None else asked.tasks)}
    return next_draw(verdict, baseline, policy, texts=asked.texts, items=asked.items, first_texts=first,
                     texts_there=len(data.texts), sizes=sizes)


def _estimate(draw: Draw, report: EvalReport, artifact: Artifact, began: float) -> str:
    """How long the draw takes, from the time of what was judged since ``began``; nothing where it was found judged."""
    if datetime.fromisoformat(artifact.manifest.created).timestamp() < math.floor(began):
        return ""
    return f" (about {duration((time.time() - began) * draw.added / (len(report.texts) + len(report.items)))})"


def _reports(shop: Workshop, ref: Ref, asked: Asked, data: EvalData | None, stored: EvalReport | None,
             reference: Reference | None) -> tuple[EvalReport, Artifact, EvalReport]:
    """(the candidate's report, its artifact, the baseline's report): found, or judged now."""
    from evals.reference import refuse_drift

    if data is None:
        assert stored is not None
        return *judging.open_report(ref), stored
    settings = settings_of(data, asked)
    against = None if stored is not None else judging.baseline_of(shop, asked.baseline, data, settings)
    baseline = stored or against.report  # type: ignore[union-attr]
    if reference is not None:
        refuse_drift(reference, baseline)
    return *judging.report_of(shop, ref, data, settings, against), baseline


def _measured(shop: Workshop, sweep: str | None) -> tuple[LatencySweep | None, Artifact | None]:
    if sweep is None:
        return None, None
    from evals.records import load_record
    from evals.report import LatencySweep

    found = resolve(sweep, shop.home, shop.store).of_kind("latency-sweep")
    return load_record(found.path, LatencySweep), Artifact.open(found.path)


def flips_of(outcome: Outcome, count: int = 10) -> list[dict[str, Any]]:
    """The worst flips as plain records: task, question, both answers and the margin by which each was preferred."""
    from evals.gate import worst_flips

    return [{"task": before.task, "id": before.id, "question": outcome.questions.get(before.id),
             "baseline": {"answer": before.answer, "margin": before.margin},
             "candidate": {"answer": after.answer, "margin": after.margin}}
            for before, after in worst_flips(outcome.baseline, outcome.report, count)]


def update_reference(shop: Workshop, path: Path, asked: Asked, reason: str) -> tuple[Reference | None, Reference]:
    """Judge the baseline and write the reference; (the old one, the new one). Written to the audit log first."""
    from evals.reference import commit_of, load_reference, reference_of, save_reference

    old = load_reference(path) if path.exists() else None
    data = data_of(shop, asked.data, asked.kind)
    report = judging.baseline_of(shop, asked.baseline, data, settings_of(data, asked)).report
    new = reference_of(report, asked, reason, commit=commit_of(path.absolute().parent), previous=old)
    shop.store.log("reference updated", str(path.name), reason=reason, old=old.sha256 if old else "none",
                   new=new.sha256, model=new.digest,
                   accuracy=f"{old.accuracy.value if old and old.accuracy else None} -> "
                            f"{new.accuracy.value if new.accuracy else None}",
                   nll=f"{old.nll.value if old and old.nll else None} -> {new.nll.value if new.nll else None}")
    save_reference(new, path)
    return old, new


@dataclass(frozen=True, slots=True)
class Noise:
    """One engine judged twice: ``flips`` of ``items`` answers changed, and NLL moved by ``nll`` nats a token at most.

    ``share`` is the upper end of the 95 % interval of the share of flips; ``smallest`` the smallest margin in points
    that this noise leaves usable over ``items`` items.
    """

    items: int
    flips: int
    share: float
    smallest: float
    nll: float


def noise(shop: Workshop, name: str, asked: Asked) -> Noise:
    """Judge an engine twice, with other batch mates the second time, and say what changed: the machine's A/A floor."""
    from engines.llm import LLM
    from evals.fidelity import evaluate, make_baseline
    from evals.gate import noise_margin
    from evals.statistics import wilson

    data = data_of(shop, asked.data, asked.kind)
    settings = settings_of(data, asked).model_copy(update={"samples": 0})
    engine = making.engine_of(shop, name)
    with LLM(engine) as llm, tempfile.TemporaryDirectory() as scratch:
        target = stages.target_of(llm, "A")
        first = make_baseline(llm, llm.tokenizer, target, data, Path(scratch) / "a", settings=settings,
                              report=shop.named("first").report)
        again = settings.model_copy(update={"batch": max(1, settings.batch // 3)})
        second = evaluate(llm, llm.tokenizer, target, data, first, Path(scratch) / "b", shop.named("second").report,
                          settings=again)
        before = {text.id: text.nll / text.tokens for text in first.report.texts}
        moved = [abs(text.nll / text.tokens - before[text.id]) for text in second.texts]
    count, flips = len(second.items), (second.flips_to_wrong or 0) + (second.flips_to_right or 0)
    if not count:
        raise UsageError("no questions were judged, so no answers can flip", "Choose data with tasks.")
    share = wilson(flips, count)[1] if flips else 0.0
    return Noise(count, flips, share, noise_margin(share, count), max(moved, default=0.0))


def speed(shop: Workshop, candidate: str, baseline: str, cell: tuple[int, int, int], margin: float, blocks: int,
          seed: int) -> SpeedVerdict:
    """Time two engines in turn in one process, and judge the ratio of medians."""
    from engines.llm import LLM
    from evals.speed_gate import SpeedGate, generation, judge_speed, run_blocks

    first, second = making.engine_of(shop, baseline), making.engine_of(shop, candidate)
    for engine in (first, second):
        check_cells([cell], engine.plan.limits)
    with LLM(first) as one, LLM(second) as other:
        found = run_blocks(generation(one, cell, seed=seed), generation(other, cell, seed=seed), blocks=blocks)
    return judge_speed(found, SpeedGate(margin=margin, seed=seed))
