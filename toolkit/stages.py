"""The stages of the pipeline, each as "make it, or find it made".

An artifact made here lies in ``<home>/artifacts/<kind>/<label>-<key>``, where ``key`` hashes everything that the stage
depends on: the digests of its inputs, its settings, and the versions of the packages that decide its numbers. So a
stage is skipped exactly when its inputs stand, whatever was killed before, and another setting never finds a stale
result. A folder that is there but damaged is thrown away, said so, and made again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.artifact import MANIFEST, Artifact, canonical_json, installed_versions, sha256_hex
from calib.errors import ArtifactError
from calib.progress import Progress, Report, silent
from toolkit.home import Home
from toolkit.job import Calibration, EngineJob, Evaluation, Limits, Sweep
from toolkit.store import RunStore
from toolkit.turns import alone
from toolkit.version import __version__

if TYPE_CHECKING:
    import torch

    from calib.checkpoint import QuantizedCheckpoint
    from calib.dataset import CalibrationSet
    from engines.engine import Engine
    from engines.llm import LLM
    from evals.data import EvalData
    from evals.fidelity import Baseline, EvalSettings
    from evals.policy import LengthRule, Policy
    from evals.report import EvalReport, LatencySweep, Target, Verdict


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where stages work: home, its store, who listens, and whether the network may be touched."""

    home: Home
    store: RunStore
    report: Report = silent
    offline: bool = False

    def named(self, prefix: str) -> Workshop:
        """The same, with its progress shown under ``prefix``."""
        listen = self.report

        def report(event: Progress) -> None:
            listen(replace(event, stage=f"{prefix}: {event.stage}"))

        return replace(self, report=report)

    def place(self, kind: str, label: str, **inputs: Any) -> Path:
        key = sha256_hex(canonical_json({"stage": kind, "toolkit": __version__, "versions": installed_versions(),
                                         "inputs": inputs}))
        return self.home.artifacts(kind) / f"{label}-{key[:16]}"

    @property
    def answers(self) -> Path:
        """Where targets' answers are kept item by item: another toolkit or package version asks again."""
        versions = {"toolkit": __version__, "versions": installed_versions()}
        return self.home.answers / sha256_hex(canonical_json(versions))[:16]

    def standing(self, path: Path, kind: str) -> Artifact | None:
        """The artifact at ``path`` if it is there and whole; a damaged one is removed."""
        if not path.exists():
            return None
        try:
            artifact = Artifact.open(path, kind)
        except ArtifactError as error:
            if not (path / MANIFEST).exists() and any(path.iterdir()):
                raise
            self.report(Progress(f"{path.name} is damaged and made again", 0, None, "file", error.message))
            shutil.rmtree(path)
            return None
        self.store.remember(artifact)
        return artifact

    def made(self, path: Path, kind: str, make: Callable[[], object]) -> Artifact:
        """The artifact at ``path``: found standing, or made by ``make``. Of several processes that want it one makes
        it; the others wait, say so, and find it standing."""
        with alone(path, self.report):
            found = self.standing(path, kind)
            if found is None:
                make()
                found = self.standing(path, kind)
        assert found is not None
        return found


Inspect = Callable[["torch.nn.Module"], None]


def label_of(engine: EngineJob) -> str:
    return engine.recipe if engine.kv_cache == "bf16" else f"{engine.recipe}-kv-{engine.kv_cache}"


def model_digest(model: Path) -> str:
    """Hash over the files that decide what a model folder computes."""
    from calib.checkpoint import QuantizedCheckpoint
    return QuantizedCheckpoint.open(model).digest


@dataclass(frozen=True, slots=True)
class Material:
    """A model and what it is calibrated on, where a recipe needs data: what decides a checkpoint beside the recipe."""

    model: Path
    model_digest: str
    calibration: CalibrationSet | None
    choose: list[str]
    seed: int


def material(shop: Workshop, model: Path, data: EvalData, choose: EvalData, settings: Calibration, seed: int,
             judged: EvalData | None = None) -> Material:
    """Pack the calibration set, or find it packed; refused when it shares text with what will be judged."""
    from calib.dataset import CalibrationSet, refuse_overlap
    from calib.text import Tokenizer

    tokenizer = Tokenizer.open(model)
    place = shop.place("calibration-set", model.name, tokenizer=tokenizer.digest, data=data.digest, seed=seed,
                       settings=settings.model_dump(mode="json"))
    shop.made(place, "calibration-set", lambda: CalibrationSet.build(
        [data.path / "texts.jsonl"], tokenizer, place, rows=settings.rows, length=settings.length, seed=seed,
        chat=settings.chat))
    calibration, chosen = CalibrationSet.open(place), [text.text for text in choose.texts]
    if judged is not None:
        texts = [text.text for text in judged.texts]
        refuse_overlap(calibration, texts, "calibration and evaluation")
        refuse_overlap(chosen, texts, "choose and evaluation")
    return Material(model, model_digest(model), calibration, chosen, seed)


def checkpoint_place(shop: Workshop, stuff: Material, engine: EngineJob) -> Path:
    from calib.recipe import load_recipe
    recipe, text = load_recipe(engine.recipe), stuff.calibration
    data = {} if text is None or not recipe.needs_data(engine.kv_cache) else {
        "calibration": text.digest, "choose": sha256_hex(canonical_json(stuff.choose))}
    return shop.place("quantized-checkpoint", label_of(engine), model=stuff.model_digest, kv_cache=engine.kv_cache,
                      recipe=recipe.model_dump(mode="json"), seed=stuff.seed, **data)


def checkpoint(shop: Workshop, stuff: Material, engine: EngineJob, inspect: Inspect | None = None
               ) -> QuantizedCheckpoint:
    """Calibrate by a recipe, or find the checkpoint made. ``inspect`` sees the fake-quantized model in memory."""
    from calib.checkpoint import QuantizedCheckpoint
    from calib.recipe import load_recipe

    place = checkpoint_place(shop, stuff, engine)

    def calibrate() -> None:
        from calib.calibrate import quantize  # brings modelopt, which takes seconds to import
        quantize(stuff.model, load_recipe(engine.recipe), place, kv_cache=engine.kv_cache,
                 calibration=stuff.calibration, choose_texts=stuff.choose, report=shop.report, inspect=inspect,
                 seed=stuff.seed, measured=shop.home.path / "measured")
    shop.made(place, "quantized-checkpoint", calibrate)
    return QuantizedCheckpoint.open(place)


def engine(shop: Workshop, source: QuantizedCheckpoint, limits: Limits, label: str) -> Engine:
    """Build an engine, or find it built. The key holds the device, so that another machine builds its own."""
    from engines.build.builder import build
    from engines.device import detect
    from engines.engine import FORMAT, Engine

    spec = limits.spec(source.config)
    place = shop.place("engine", label, format=FORMAT, checkpoint=source.digest, spec=spec.model_dump(mode="json"),
                       device=detect(spec.device).model_dump(mode="json"))
    shop.made(place, "engine", lambda: build(source, spec, place, shop.report, tuning=shop.home.path / "tuning"))
    return Engine.open(place)


def finished(shop: Workshop, path: Path) -> Engine:
    """A prepared engine tuned for this machine's device, or found so: it is finished once in a home and on a device."""
    from engines.build.prepare import Prepared, device_here, finish
    from engines.engine import FORMAT, Engine

    prepared = Prepared.open(path)
    place = shop.place("engine", "prepared", format=FORMAT, prepared=prepared.artifact.digest,
                       device=device_here(prepared).model_dump(mode="json"))
    shop.made(place, "engine", lambda: finish(prepared, place, shop.report, tuning=shop.home.path / "tuning"))
    return Engine.open(place)


def eval_settings(evaluation: Evaluation, seed: int, policy: Policy) -> EvalSettings:
    from evals.fidelity import EvalSettings

    return with_length(EvalSettings(tasks=tuple(evaluation.tasks), limit_items=evaluation.items, seed=seed,
                                    limit_texts=evaluation.texts, window=evaluation.window), policy.length)


def with_length(settings: EvalSettings, length: LengthRule | None) -> EvalSettings:
    """The settings with the continuations that a length rule needs, if there is one."""
    from evals.length import LENGTH_TOKENS

    if length is None:
        return settings
    return settings.model_copy(update={"samples": length.min_samples, "sample_tokens": LENGTH_TOKENS})


def target_of(llm: LLM, name: str) -> Target:
    from evals.target import describe

    return describe(name, llm.engine.digest, llm.numerics, llm.tokenizer)


def baseline(shop: Workshop, source: QuantizedCheckpoint | Engine, data: EvalData, settings: EvalSettings) -> Baseline:
    """Judge what candidates are compared with, or find it judged.

    A model (or checkpoint) is judged in memory, float32 arithmetic on its own weights: so our engine of the unquantized
    model has its loss measured like any other engine's. An engine is judged as it runs.
    """
    from engines.engine import Engine
    from engines.llm import LLM
    from evals.fidelity import Baseline, make_baseline

    place = shop.place("baseline", "baseline", source=source.digest, data=data.digest,
                       settings=settings.model_dump(mode="json", exclude={"batch"}))

    def judge() -> None:
        if isinstance(source, Engine):
            with LLM(source) as llm:
                make_baseline(llm, llm.tokenizer, target_of(llm, "baseline engine"), data, place, settings=settings,
                              report=shop.report, cache=shop.answers)
        else:
            scorer, target = module_scorer(source, "baseline model in memory")
            make_baseline(scorer, source.tokenizer(), target, data, place, settings=settings, report=shop.report,
                          cache=shop.answers)
    shop.made(place, "baseline", judge)
    return Baseline.open(place)


def module_scorer(source: QuantizedCheckpoint, name: str) -> tuple[Any, Target]:
    """The checkpoint as a fake-quantized module in memory, and who that is."""
    from calib.model import load_model
    from evals.module import ModuleScorer
    from evals.target import describe

    tokenizer = source.tokenizer()
    return ModuleScorer(load_model(source), tokenizer), describe(name, source.digest, "cpu fp32 module", tokenizer)


def evaluation(shop: Workshop, built: Engine, data: EvalData, against: Baseline | None, settings: EvalSettings,
               label: str) -> tuple[EvalReport, Artifact]:
    """Judge an engine (against the baseline, if there is one), or find that judged."""
    from engines.llm import LLM
    from evals.fidelity import evaluate
    from evals.records import load_record
    from evals.report import EvalReport

    place = shop.place("eval-report", label, engine=built.digest, baseline=against.digest if against else None,
                       data=data.digest, settings=settings.model_dump(mode="json", exclude={"batch"}))

    def judge() -> None:
        with LLM(built) as llm:
            evaluate(llm, llm.tokenizer, target_of(llm, label), data, against, place, shop.report, settings=settings,
                     cache=shop.answers)
    found = shop.made(place, "eval-report", judge)
    return load_record(place, EvalReport), found


def latency(shop: Workshop, built: Engine, settings: Sweep, seed: int, label: str) -> tuple[LatencySweep, Artifact]:
    """Measure an engine's latency, throughput and memory, or find them measured."""
    from engines.llm import LLM
    from evals.latency import sweep
    from evals.records import load_record
    from evals.report import LatencySweep

    place = shop.place("latency-sweep", label, engine=built.digest, settings=settings.model_dump(mode="json"),
                       seed=seed)

    def measure() -> None:
        with LLM(built) as llm:
            sweep(llm, target_of(llm, label), settings.cells, device=built.device, warmup=settings.warmup,
                  repeats=settings.repeats, seed=seed, out=place, engine=built.path,
                  max_batch_size=built.plan.limits.max_batch_size, report=shop.report)
    found = shop.made(place, "latency-sweep", measure)
    return load_record(place, LatencySweep), found


def verdict(shop: Workshop, report: EvalReport, report_artifact: Artifact, against: EvalReport | None, policy: Policy,
            measured: LatencySweep | None, measured_artifact: Artifact | None, label: str, candidates: int = 1
            ) -> tuple[Verdict, Artifact]:
    """Judge a report under a policy and keep the verdict, with its evidence as parents. Cheap: always computed."""
    from evals.gate import judge
    from evals.records import save_record

    found = judge(report, against, policy, measured, candidates=candidates)
    parents = [report_artifact.digest, *([measured_artifact.digest] if measured_artifact else [])]
    place = shop.place("verdict", label, parents=parents, policy=policy.sha256, verdict=found.model_dump(mode="json"))
    artifact = shop.standing(place, "verdict") or save_record(found, place, parents)
    shop.store.add_verdict(artifact, found)
    return found, artifact
