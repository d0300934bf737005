"""Between plan and folder: the ways in which a checkpoint is made, and what every one of them must hold to.

The whole model in memory (by modelopt's quantizers, or by the solver), layer by layer, or unchanged. All of them end in
a folder that is read back and compared with the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from calib.apart import round_apart, with_rounded
from calib.checkpoint import QuantizedCheckpoint
from calib.dataset import pack_texts
from calib.errors import CalibError
from calib.formats.hf import write_shards
from calib.head import HEAD, quantize_head
from calib.kept import read_kept, write_kept
from calib.layer_store import LayerStore
from calib.layer_work import LayerWork
from calib.layers import family_of
from calib.model import check_finite, load_hf, load_model
from calib.peak import released
from calib.plan import CalibrationPlan
from calib.progress import Progress, Report
from calib.sanity import Before, check_after, observe
from calib.scheme import Scheme
from calib.solve import run_solved
from calib.text import Tokenizer
from calib.verify import verify_folder
from calib.writing import WRITERS, planned_config, write_config, write_side_files

Inspect = Callable[[nn.Module], None]
_CHOOSE_LENGTH = 256


class CoverageError(CalibError):
    """The checkpoint does not hold what the plan said."""

    code = "coverage"


@dataclass(slots=True)
class Memory:
    """Losses measured so far, kept in ``path`` under the key of everything they depend on."""

    path: Path
    key: str
    losses: dict[str, float] = field(default_factory=dict)

    def load(self) -> None:
        self.losses = read_kept(self.path, self.key)

    def __call__(self, name: str, measure: Callable[[], float]) -> float:
        if name not in self.losses:
            self.losses[name] = measure()
            write_kept(self.path, self.key, self.losses)
        return self.losses[name]


@dataclass(slots=True)
class Outcome:
    """What the methods decided."""

    schemes: dict[str, Scheme]
    record: dict[str, Any] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Stage:
    """One run: the inputs, and the steps between plan and folder."""

    plan: CalibrationPlan
    source: QuantizedCheckpoint
    tokenizer: Tokenizer
    batches: list[torch.Tensor]
    choose_texts: tuple[str, ...]
    report: Report
    inspect: Inspect | None
    memory: Memory
    work: Path
    key: str

    def run(self, folder: Path) -> Outcome:
        """Fill ``folder`` with the checkpoint's files."""
        plain = self.plan.recipe.method == "none" and not self.plan.kv.quantized
        way = (self._unchanged if plain else self._layer_by_layer if self.plan.layerwise
               else self._solved if self.plan.recipe.solved else self._calibrated)
        outcome = way(folder)
        write_side_files(folder, self.source, self.tokenizer)
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

    def _unchanged(self, folder: Path) -> Outcome:
        """The bf16 recipe: every tensor in bf16, a tied head left out."""
        check_finite(self.source.shards)
        tied = self.plan.tied_embeddings

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for index, (name, tensor) in enumerate(self.source.tensors()):
                self.report(Progress("copy weights", index, len(self.source.shards), "tensor"))
                if not (tied and name == "lm_head.weight"):
                    yield name, tensor.to(torch.bfloat16)

        write_shards(folder, tensors())
        write_config(folder, planned_config(self.source, self.plan))
        if self.inspect is not None:
            self.inspect(load_hf(folder))
        return Outcome({})

    def _layer_by_layer(self, folder: Path) -> Outcome:
        from calib import layerwise  # modelopt takes seconds to import: the bf16 recipe runs without it
        family = family_of(self.source.config, str(self.source.path))
        recipe = self.plan.recipe
        work = LayerWork(self.plan, self.source, family, self.plan.schemes, self.batches,
                         LayerStore(self.work / "layers", self.key), LayerStore(self.work / "trials", self.key),
                         self.report)
        choose = self._choose_tokens() if len(recipe.alphas) > 1 else self.batches[0]
        record = layerwise.calibrate_layers(work, choose, self.memory)
        outcome = Outcome(work.schemes, record, layerwise.look(work, self.tokenizer))
        WRITERS[self.plan.layout].write(folder, planned_config(self.source, self.plan), outcome.schemes, self.plan.kv,
                                        released(layerwise.layer_tensors(work)))
        if self.inspect is not None:
            self.inspect(load_model(QuantizedCheckpoint(folder, None)))
        return outcome

    def _calibrated(self, folder: Path) -> Outcome:
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

    def _solved(self, folder: Path) -> Outcome:
        """The methods of ``calib.solve``, which run without modelopt."""
        self.report(Progress("load model", 0, 1, "model"))
        model, family = load_hf(self.source.path), family_of(self.source.config, str(self.source.path))
        before = observe(model, self.batches[0][:1])
        schemes, record = self._protected()
        solved = run_solved(model, self.plan, schemes, self.batches, self.report, family)
        outcome = Outcome(schemes, record, dict(solved.evidence))
        self._finish(folder, model, outcome, before, solved.stream(model))
        return outcome

    def _finish(self, folder: Path, model: nn.Module, outcome: Outcome, before: Before,
                tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """What is rounded apart, a look at the model as it will be written, the writing. ``tensors`` is read last."""
        raised = self.plan.raised_schemes
        rounded, outcome.schemes = round_apart(model, raised), {**outcome.schemes, **raised}
        if HEAD in self.plan.schemes:
            scheme = self.plan.schemes[HEAD]
            rounded[HEAD], outcome.schemes[HEAD] = quantize_head(model, scheme.weight), scheme
        tensors = with_rounded(tensors, rounded)
        outcome.evidence |= check_after(model, before, self.batches[0][:1], self.tokenizer)
        if self.inspect is not None:
            self.inspect(model)
        self.report(Progress("export", 0, 1, "checkpoint"))
        WRITERS[self.plan.layout].write(folder, planned_config(self.source, self.plan), outcome.schemes, self.plan.kv,
                                        released(tensors))

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

    def _find_scales(self, methods: Any, model: nn.Module) -> Outcome:
        plan, recipe, batches = self.plan, self.plan.recipe, self.batches
        family = family_of(self.source.config, str(self.source.path))
        schemes, record = self._protected()
        if recipe.method == "smooth":
            choose = self._choose_tokens() if len(recipe.alphas) > 1 else batches[0]
            record["alpha"] = methods.run_smooth(model, plan, schemes, batches, self.report, family=family,
                                                 source=self.source.shards, choose=choose, measure=self.memory)
        else:
            methods.find_scales(model, plan, schemes, batches, self.report, family)
        return Outcome(schemes, record)

    def _choose_tokens(self) -> torch.Tensor:
        length = min(_CHOOSE_LENGTH, self.plan.recipe.choose_tokens)
        return pack_texts(self.choose_texts, self.tokenizer, length, self.plan.recipe.choose_tokens // length)
