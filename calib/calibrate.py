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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from calib.artifact import ArtifactWriter, canonical_json, installed_versions, sha256_hex, write_atomic
from calib.checkpoint import FORMAT, KIND, QuantizedCheckpoint
from calib.dataset import CalibrationSet, pack_texts, refuse_overlap
from calib.errors import CalibError
from calib.formats.awq import AwqLayout
from calib.formats.compressed_tensors import CompressedTensorsLayout
from calib.formats.gguf import SOURCE_FILE
from calib.formats.gptq import GptqLayout
from calib.formats.hf import write_shards
from calib.formats.modelopt import ModeloptLayout
from calib.hardware import check_hardware
from calib.head import HEAD, quantize_head, with_head
from calib.layer_store import LayerStore
from calib.layer_work import LayerWork
from calib.layers import family_of
from calib.model import check_finite, load_hf, resolve_model
from calib.plan import CalibrationPlan, KvChoice, check_disk, make_plan
from calib.progress import Progress, Report, silent
from calib.recipe import Recipe
from calib.sanity import Before, check_after, observe
from calib.scheme import Scheme
from calib.solve import run_solved
from calib.text import Tokenizer
from calib.verify import verify_folder

Inspect = Callable[[nn.Module], None]
_CHOOSE_LENGTH = 256
WRITERS: dict[str, Any] = {"modelopt": ModeloptLayout(), "compressed-tensors": CompressedTensorsLayout(),
                           "awq": AwqLayout(), "gptq": GptqLayout()}


class CoverageError(CalibError):
    """The checkpoint does not hold what the plan said."""

    code = "coverage"


@dataclass(slots=True)
class _Memory:
    """Losses measured so far, kept in ``path`` under the key of everything they depend on."""

    path: Path
    key: str
    losses: dict[str, float] = field(default_factory=dict)

    def load(self) -> None:
        if self.path.is_file():
            held = json.loads(self.path.read_bytes())
            self.losses = held["losses"] if held.get("key") == self.key else {}

    def __call__(self, name: str, measure: Callable[[], float]) -> float:
        if name not in self.losses:
            self.losses[name] = measure()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, canonical_json({"key": self.key, "losses": self.losses}))
        return self.losses[name]


@dataclass(slots=True)
class _Outcome:
    """What the methods decided."""

    schemes: dict[str, Scheme]
    record: dict[str, Any] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)


def quantize(model: str | Path, recipe: Recipe, out: Path, *, kv_cache: KvChoice = "bf16",
             calibration: CalibrationSet, choose_texts: Sequence[str] = (), report: Report = silent,
             inspect: Inspect | None = None, resume: bool = True, seed: int = 0, offline: bool = False,
             measured: Path | None = None, layerwise: str = "off") -> QuantizedCheckpoint:
    """Calibrate ``model`` by ``recipe`` and write a validated checkpoint to ``out`` (which must not exist).

    ``choose_texts`` are for measured choices (smoothing strength, protected layers) and must overlap neither
    calibration nor evaluation. ``inspect`` is called once with the finished model in memory: fake-quantized, exactly
    what was written. Losses of candidates are kept until the checkpoint is whole, or, in the folder ``measured``, for
    every later call that would measure the same (a KV cache on another grid is no difference: it is off while choices
    are made). ``resume`` False forgets what an earlier, killed run measured. ``seed`` picks the calibration rows
    where the set has more than the recipe uses, added to the recipe's own. The same inputs on the same kind of
    machine give the same digest. Errors: those of ``make_plan``, CalibrationDataError, SanityError, CoverageError,
    DiskSpaceError, ArtifactError; each names the module or file.
    """
    started = time.monotonic()
    check_hardware(recipe)
    plan = make_plan(model, recipe, kv_cache, out=Path(out), length=calibration.tokens.shape[1], offline=offline)
    check_disk(plan)
    folder = resolve_model(model, offline=offline)
    source = QuantizedCheckpoint.open(folder)
    tokenizer = source.tokenizer()
    calibration.check_tokenizer(tokenizer)
    refuse_overlap(calibration, choose_texts, "calibration and choose texts")
    with ArtifactWriter(Path(out), KIND, FORMAT, parents=[calibration.digest]) as writer:
        work = writer.path.with_name(f".{writer.path.name}.work")
        key = _inputs_key(plan, source, calibration, choose_texts, seed)
        memory = _Memory(work / "losses.json" if measured is None else measured / f"{key[:16]}.json", key)
        if resume:
            memory.load()
        batches = calibration.batches(recipe.rows, recipe.seed + seed)
        stage = _Stage(plan, source, tokenizer, batches, tuple(choose_texts), report, inspect, memory, work,
                       f"{key} {plan.kv}", layerwise == "on")
        outcome = stage.run(writer.folder)
        writer.record = _record(plan, source, calibration, outcome, seed)
        outcome.evidence |= {"seconds": round(time.monotonic() - started, 2), "model": str(model),
                             "losses": memory.losses, "versions": installed_versions(),
                             "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        writer.evidence("calibration.json").write_bytes(json.dumps(outcome.evidence, indent=1).encode())
        report(Progress("write", 1, 1, "checkpoint"))
    shutil.rmtree(work, ignore_errors=True)
    return QuantizedCheckpoint.open(writer.path)


def _inputs_key(plan: CalibrationPlan, source: QuantizedCheckpoint, calibration: CalibrationSet,
                choose_texts: Sequence[str], seed: int) -> str:
    return sha256_hex(canonical_json({
        "recipe": plan.recipe.model_dump(mode="json"), "source": source.digest,
        "calibration": calibration.digest, "choose": [sha256_hex(text.encode()) for text in choose_texts],
        "seed": seed, "versions": installed_versions()}))


def _record(plan: CalibrationPlan, source: QuantizedCheckpoint, calibration: CalibrationSet, outcome: _Outcome,
            seed: int) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for scheme in outcome.schemes.values():
        counts[str(scheme)] = counts.get(str(scheme), 0) + 1
    return {"recipe": plan.recipe.name, "recipe_content": plan.recipe.model_dump(mode="json"),
            "kv": plan.kv.model_dump(mode="json"), "layout": plan.layout, "group_size": plan.group_size,
            "architecture": plan.architecture, "schemes": counts, "unquantized": _unquantized(plan, outcome),
            "source": source.digest, "source_grid": plan.source_grid, "calibration": calibration.digest,
            "calibration_rows": min(plan.recipe.rows, calibration.rows), "seed": seed, **outcome.record}


def _unquantized(plan: CalibrationPlan, outcome: _Outcome) -> dict[str, str]:
    protected = {name: "protected: its loss in low precision was among the largest" for name in plan.schemes
                 if name not in outcome.schemes}
    return dict(sorted({**plan.left, **protected}.items()))


@dataclass(slots=True)
class _Stage:
    """One run: the inputs, and the steps between plan and folder."""

    plan: CalibrationPlan
    source: QuantizedCheckpoint
    tokenizer: Tokenizer
    batches: list[torch.Tensor]
    choose_texts: tuple[str, ...]
    report: Report
    inspect: Inspect | None
    memory: _Memory
    work: Path
    key: str
    layerwise: bool

    def run(self, folder: Path) -> _Outcome:
        """Fill ``folder`` with the checkpoint's files."""
        plain = self.plan.recipe.method == "none" and not self.plan.kv.quantized
        if self.layerwise and (self.plan.recipe.solved or HEAD in self.plan.schemes):
            raise CalibError(f"recipe {self.plan.recipe.name} cannot be calibrated from layers on disk: method "
                             f"{self.plan.recipe.method!r} and a quantized lm_head need the whole model in memory",
                             "Use layerwise off, or a recipe of method max, smooth or awq_lite.")
        whole = (self._layer_by_layer if self.layerwise else self._solved if self.plan.recipe.solved
                 else self._calibrated)
        outcome = self._unchanged(folder) if plain else whole(folder)
        self._side_files(folder)
        self.report(Progress("verify", 0, 1, "checkpoint"))
        written = QuantizedCheckpoint(folder, None)
        if written.schemes != outcome.schemes or written.kv != self.plan.kv:
            wrong = next((name for name in sorted({*written.schemes, *outcome.schemes})
                          if written.schemes.get(name) != outcome.schemes.get(name)), "the KV cache")
            raise CoverageError(f"{wrong} was planned as {outcome.schemes.get(wrong)} and written as "
                                f"{written.schemes.get(wrong)}", "This is a fault of the toolkit or of modelopt.")
        faults = verify_folder(written)
        if faults:
            raise CoverageError(f"the checkpoint came out wrong: {faults[0]}",
                                "This is a fault of the toolkit or of modelopt.")
        return outcome

    def _unchanged(self, folder: Path) -> _Outcome:
        """The bf16 recipe: every tensor in bf16, a tied head left out."""
        check_finite(self.source.shards)
        tied = self.plan.tied_embeddings

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for index, (name, tensor) in enumerate(self.source.tensors()):
                self.report(Progress("copy weights", index, len(self.source.shards), "tensor"))
                if not (tied and name == "lm_head.weight"):
                    yield name, tensor.to(torch.bfloat16)

        write_shards(folder, tensors())
        self._write_config(folder, None)
        if self.inspect is not None:
            self.inspect(load_hf(folder))
        return _Outcome({})

    def _layer_by_layer(self, folder: Path) -> _Outcome:
        from calib import layerwise  # modelopt takes seconds to import: the bf16 recipe runs without it
        family = family_of(self.source.config, str(self.source.path))
        recipe = self.plan.recipe
        work = LayerWork(self.plan, self.source, family, self.plan.schemes, self.batches,
                         LayerStore(self.work / "layers", self.key), LayerStore(self.work / "trials", self.key),
                         self.report)
        choose = self._choose_tokens() if len(recipe.alphas) > 1 else self.batches[0]
        record = layerwise.calibrate_layers(work, choose, self.memory)
        outcome = _Outcome(work.schemes, record, layerwise.look(work, self.tokenizer))
        WRITERS[self.plan.layout].write(folder, self._config(), outcome.schemes, self.plan.kv,
                                        layerwise.layer_tensors(work))
        return outcome

    def _calibrated(self, folder: Path) -> _Outcome:
        from calib import methods, quantizer  # modelopt takes seconds to import: the bf16 recipe runs without it
        self.report(Progress("load model", 0, 1, "model"))
        model = load_hf(self.source.path)
        row = self.batches[0][:1]
        before = observe(model, row)
        outcome = self._find_scales(methods, model)
        body = {name: scheme for name, scheme in outcome.schemes.items() if name != HEAD}
        enabled = quantizer.enabled_modules(model)
        if enabled != set(body):
            wrong = min(enabled ^ set(body))
            raise CoverageError(f"{wrong} is {'not ' if wrong in outcome.schemes else ''}quantized, against the plan",
                                "This is a fault of the toolkit or of modelopt.")
        # The weights lie on their grids already: rounding them again in every forward would only cost time.
        with quantizer.disabled(model, quantizer.weight_quantizers(body)):
            self._finish(folder, model, outcome, before, methods.canonical_tensors(model, self.plan, body))
        return outcome

    def _solved(self, folder: Path) -> _Outcome:
        """The methods of ``calib.solve``, which run without modelopt."""
        self.report(Progress("load model", 0, 1, "model"))
        model, family = load_hf(self.source.path), family_of(self.source.config, str(self.source.path))
        before = observe(model, self.batches[0][:1])
        schemes, record = self._protected()
        solved = run_solved(model, self.plan, schemes, self.batches, self.report, family)
        outcome = _Outcome(schemes, record, dict(solved.evidence))
        self._finish(folder, model, outcome, before, solved.stream(model))
        return outcome

    def _finish(self, folder: Path, model: nn.Module, outcome: _Outcome, before: Before,
                tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """The head, a look at the model as it will be written, and the writing. ``tensors`` is read last."""
        if HEAD in self.plan.schemes:
            scheme = self.plan.schemes[HEAD]
            tensors = with_head(tensors, quantize_head(model, scheme.weight))
            outcome.schemes = {**outcome.schemes, HEAD: scheme}
        outcome.evidence |= check_after(model, before, self.batches[0][:1], self.tokenizer)
        if self.inspect is not None:
            self.inspect(model)
        self.report(Progress("export", 0, 1, "checkpoint"))
        WRITERS[self.plan.layout].write(folder, self._config(), outcome.schemes, self.plan.kv, tensors)

    def _protected(self) -> tuple[dict[str, Scheme], dict[str, Any]]:
        """The layers' schemes without those of protected layers, and what to record of the choice."""
        schemes = self.plan.layer_schemes
        if not self.plan.recipe.protect:
            return schemes, {}
        from calib import methods
        family = family_of(self.source.config, str(self.source.path))
        layers = methods.choose_protected(load_hf(self.source.path), self.plan, family, self._choose_tokens(),
                                          self.batches, self.memory, self.report)
        left = {name: scheme for name, scheme in schemes.items()
                if not any(name.startswith(f"{family.layers}.{layer}.") for layer in layers)}
        return left, {"protected_layers": layers}

    def _find_scales(self, methods: Any, model: nn.Module) -> _Outcome:
        plan, recipe, batches = self.plan, self.plan.recipe, self.batches
        family = family_of(self.source.config, str(self.source.path))
        schemes, record = self._protected()
        if recipe.method == "smooth":
            choose = self._choose_tokens() if len(recipe.alphas) > 1 else batches[0]
            record["alpha"] = methods.run_smooth(model, plan, schemes, batches, self.report, family=family,
                                                 source=self.source.shards, choose=choose, measure=self.memory)
        else:
            methods.find_scales(model, plan, schemes, batches, self.report, family)
        return _Outcome(schemes, record)

    def _choose_tokens(self) -> torch.Tensor:
        length = min(_CHOOSE_LENGTH, self.plan.recipe.choose_tokens)
        return pack_texts(self.choose_texts, self.tokenizer, length, self.plan.recipe.choose_tokens // length)

    def _config(self) -> dict[str, Any]:
        config = {key: value for key, value in self.source.config.items() if key != "torch_dtype"}
        if HEAD in self.plan.schemes:
            config["tie_word_embeddings"] = False
        return {**config, "dtype": "bfloat16"}

    def _write_config(self, folder: Path, quantization: dict[str, Any] | None) -> None:
        config = self._config()
        if quantization is not None:
            config["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _side_files(self, folder: Path) -> None:
        """Tokenizer, template, generation_config, and where the weights came from."""
        self.tokenizer.save(folder)
        if not (folder / "generation_config.json").is_file():
            (folder / "generation_config.json").write_text(
                json.dumps({"eos_token_id": list(self.tokenizer.eos_ids)}) + "\n", encoding="utf-8")
        origin = self.source.path / SOURCE_FILE
        if origin.is_file():
            (folder / SOURCE_FILE).write_bytes(origin.read_bytes())


