"""``run(job)``: the whole pipeline as a story.

    for each engine of the job:  quantize -> build -> evaluate -> sweep -> gate;  then the table and the report

The unquantized model is judged first, in memory; every engine is compared with it text by text. While a model is still
in memory after calibration, the fake-quantized module is scored on the same texts: that figure beside the engine's own
says whether the engine adds loss of its own.

Each stage is "make it, or find it made" (``stages``), so a job that was killed anywhere goes on where it was and ends
with the same digests; a job that is run again does nothing but print.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.artifact import canonical_json, installed_versions, sha256_hex, write_atomic
from calib.progress import Progress
from evals.data import EvalData
from evals.policy import Policy, load_policy
from evals.report import Estimate, Row, Verdict
from toolkit import stages
from toolkit.errors import JobError
from toolkit.foreseeing import build_with, refuse_for_engine
from toolkit.job import REFERENCE, EngineJob, Job, inside, model_of
from toolkit.rows import make_row
from toolkit.stages import Material, Workshop
from toolkit.store import Run, StoredRow

if TYPE_CHECKING:
    import torch

    from calib.checkpoint import QuantizedCheckpoint
    from engines.engine import Engine
    from evals.fidelity import Baseline, EvalSettings

#: Rough shares of the time of one engine's stages; they only shape the job's overall progress.
_WEIGHTS = {"quantize": 4.0, "build": 1.0, "evaluate": 4.0, "sweep": 2.0}


@dataclass(frozen=True, slots=True)
class Plan:
    """A job with everything it names resolved and opened."""

    job: Job
    model: Path
    model_digest: str
    data: EvalData
    choose: EvalData
    evaluation: EvalData
    policy: Policy
    facts: dict[str, Any]

    @property
    def run_id(self) -> str:
        """The same job on the same inputs, versions and device is the same run."""
        key = {"job": self.job.model_dump(mode="json"), "model": self.model_digest, "data": self.data.digest,
               "choose": self.choose.digest, "evaluation": self.evaluation.digest, "policy": self.policy.sha256,
               "versions": self.facts["versions"], "device": self.facts["device"]}
        return f"{self.job.name}-{sha256_hex(canonical_json(key))[:12]}"


def prepare(shop: Workshop, job: Job, folder: Path) -> Plan:
    """Resolve and open everything the job names, before anything runs. ``folder``: where the job file lies."""
    from calib.config import read_config
    from calib.recipe import load_recipe
    from calib.source import resolve_model
    from engines.device import detect

    recipes = [load_recipe(engine.recipe) for engine in job.engines]
    policy = load_policy(inside(job.policy, folder, shop.home.path))
    data, choose, evaluation = (EvalData.load(inside(name, folder, shop.home.data)) for name in
                                (job.calibration.data, job.calibration.choose, job.evaluation.data))
    for task in job.evaluation.tasks:
        evaluation.task(task)
    model = resolve_model(model_of(job, folder, shop.home), offline=shop.offline)
    for engine, recipe in zip(job.engines, recipes, strict=True):
        refuse_for_engine(model, recipe, engine.kv_cache, build_with(job.limits), length=job.calibration.length)
    if fault := job.too_long(job.limits.spec(read_config(model)).max_seq_len or 0):
        raise JobError(f"{fault}, all positions that {model.name} has", "Ask for shorter ones, or another model.")
    digest = stages.model_digest(model)
    facts = {"model": model.name, "model_digest": digest, "device": str(detect(job.limits.device)),
             "evaluation": f"{job.evaluation.texts} texts, {job.evaluation.items or 'all'} questions of each of "
                           f"{', '.join(job.evaluation.tasks) or 'no task'}",
             "evaluation_digest": evaluation.digest,
             "calibration": f"{job.calibration.rows} rows of {job.calibration.length} tokens",
             "licences": {f"{what} {name}": licence for what, part in
                          (("calibration", data), ("evaluation", evaluation))
                          for name, licence in part.licences.items()},
             "policy": policy.name, "policy_sha256": policy.sha256,
             "margin": policy.delta_nll.margin if policy.delta_nll else None,
             "seed": job.seed, "versions": installed_versions()}
    return Plan(job, model, digest, data, choose, evaluation, policy, facts)


class _Steps:
    """The job's overall progress, kept in the store for other terminals and the page."""

    def __init__(self, shop: Workshop, plan: Plan) -> None:
        self._shop, self._run, self._done = shop, plan.run_id, 0.0
        self._total = sum(_WEIGHTS.values()) * (len(plan.job.engines) + 0.5)

    def begin(self, name: str) -> None:
        self._shop.store.job_progress(self._run, name, self._done, self._total)

    def end(self, stage: str, share: float = 1.0) -> None:
        self._done += share * _WEIGHTS[stage]


def run(shop: Workshop, job: Job, folder: Path) -> tuple[Run, list[StoredRow]]:
    """Run a job to its end and return the stored run with its rows; what was made before is not made again."""
    plan = prepare(shop, job, folder)
    shop.store.begin(plan.run_id, job.name, plan.facts)
    try:
        rows = _run(shop, plan)
        report = shop.home.reports / f"{plan.run_id}.html"
        shop.store.finish(plan.run_id, rows, report)
        found = shop.store.find_run(plan.run_id)
        _write_report(shop, found, report)
    except BaseException:
        shop.store.fail(plan.run_id)
        raise
    return found, rows


def _run(shop: Workshop, plan: Plan) -> list[StoredRow]:
    from calib.checkpoint import QuantizedCheckpoint

    job, steps = plan.job, _Steps(shop, plan)
    settings = stages.eval_settings(job.evaluation, job.seed, plan.policy)
    steps.begin("pack calibration data")
    stuff = _materials(shop, plan)
    steps.begin("judge the unquantized model")
    against = stages.baseline(shop.named("unquantized model"), QuantizedCheckpoint.open(plan.model), plan.evaluation,
                              settings)
    steps.end("evaluate")
    rows = []
    for number, engine in enumerate(job.engines, 1):
        label = stages.label_of(engine)
        part = shop.named(f"{number}/{len(job.engines)} {label}")
        rows.append(_engine_row(part, plan, stuff[engine], engine, against, settings, steps, label))
    return rows


def _materials(shop: Workshop, plan: Plan) -> dict[EngineJob, Material]:
    """What each engine is calibrated on: rows drawn by the job's seed and its recipe's, or none, and then no seed."""
    from calib.recipe import load_recipe

    job, bare = plan.job, stages.Material(plan.model, stages.model_digest(plan.model), None, [], 0)
    drawn: dict[int, Material] = {}
    found = {}
    for engine in job.engines:
        recipe = load_recipe(engine.recipe)
        if not recipe.needs_data(engine.kv_cache):
            found[engine] = bare
            continue
        if recipe.seed not in drawn:
            made = stages.material(shop, plan.model, plan.data, plan.choose, job.calibration, job.seed + recipe.seed,
                                   plan.evaluation)
            drawn[recipe.seed] = replace(made, seed=job.seed)
        found[engine] = drawn[recipe.seed]
    return found


def _engine_row(shop: Workshop, plan: Plan, stuff: Material, engine: EngineJob, against: Baseline,
                settings: EvalSettings, steps: _Steps, label: str) -> StoredRow:
    """Quantize, build, evaluate, sweep and gate one engine."""
    job = plan.job
    steps.begin(f"{label}: quantize")
    source, model_delta = _quantize(shop, plan, stuff, engine, against, settings, label)
    steps.end("quantize")
    steps.begin(f"{label}: build")
    built = stages.engine(shop, source, job.limits, label)
    steps.end("build")
    steps.begin(f"{label}: evaluate")
    report, report_artifact = stages.evaluation(shop, built, plan.evaluation, against, settings, label)
    steps.end("evaluate")
    steps.begin(f"{label}: sweep")
    measured, sweep_artifact = stages.latency(shop, built, job.sweep, job.seed, label)
    steps.end("sweep")
    if engine == REFERENCE:
        verdict = _baseline_verdict(built, against, plan.policy)
    else:
        candidates = len(job.engines) - 1
        verdict, _ = stages.verdict(shop, report, report_artifact, against.report, plan.policy, measured,
                                    sweep_artifact, label, candidates)
    row = make_row(built, report, measured, verdict, job.sweep.cells[0])
    return StoredRow(row, model_delta)


def _baseline_verdict(built: Engine, against: Baseline, policy: Policy) -> Verdict:
    return Verdict(word="BASELINE", reason="the unquantized weights through the same engine", reasons=[],
                   candidate_digest=built.digest, baseline_digest=against.report.target.digest, policy=policy.name,
                   policy_sha256=policy.sha256)


def _quantize(shop: Workshop, plan: Plan, stuff: Material, engine: EngineJob, against: Baseline,
              settings: EvalSettings, label: str) -> tuple[QuantizedCheckpoint, Estimate | None]:
    """The checkpoint, and the delta NLL of its fake-quantized model while that was in memory."""
    from evals.fidelity import delta_nll, evaluate
    from evals.records import load_record
    from evals.report import EvalReport
    from evals.target import describe

    texts_only = settings.model_copy(update={"tasks": (), "samples": 0})
    name = f"{label}-in-memory"
    place = shop.place("eval-report", name, checkpoint=stages.checkpoint_place(shop, stuff, engine).name,
                       data=plan.evaluation.digest, settings=texts_only.model_dump(mode="json", exclude={"batch"}))

    def judge(scorer: Any) -> None:
        """Named by its inputs, not by the checkpoint: while the model is in memory, that has no digest yet."""
        if shop.standing(place, "eval-report") is None:
            tokenizer = source_tokenizer(stuff.model)
            target = describe(name, sha256_hex(place.name.encode()), "cpu fp32 module", tokenizer)
            evaluate(scorer, tokenizer, target, plan.evaluation, None, place, shop.report, settings=texts_only)
            shop.standing(place, "eval-report")

    def inspect(model: torch.nn.Module) -> None:
        from evals.module import ModuleScorer

        judge(ModuleScorer(model, source_tokenizer(stuff.model)))

    if engine == REFERENCE:  # the module in memory is the baseline itself
        return stages.checkpoint(shop, stuff, engine), delta_nll(against.report.texts, against.report.texts)
    source = stages.checkpoint(shop, stuff, engine, inspect)
    if shop.standing(place, "eval-report") is None:  # the checkpoint stood, but was never scored on these texts
        shop.report(Progress("load the checkpoint", 0, 1, "model"))
        judge(stages.module_scorer(source, name)[0])
    return source, delta_nll(against.report.texts, load_record(place, EvalReport).texts)


def source_tokenizer(model: Path) -> Any:
    from calib.text import Tokenizer

    return Tokenizer.open(model)


def _write_report(shop: Workshop, run: Run, path: Path) -> None:
    from toolkit.report.export import render

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, render(shop.store, run, "html").encode())


def worst(rows: Sequence[Row]) -> int:
    """The exit code of ``run --gate``: 1 for any FAIL, else 3 for any INCONCLUSIVE or ANOMALOUS, else 0."""
    from evals.gate import EXIT_CODES

    codes = {EXIT_CODES[row.verdict] for row in rows if row.verdict}
    return 1 if 1 in codes else max(codes, default=0)
