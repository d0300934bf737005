"""One layerwise calibration's material: its inputs, its store, and what every step asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from calib.checkpoint import QuantizedCheckpoint
from calib.layer_model import Sink, embedded, one_layer
from calib.layer_store import LayerStore
from calib.layers import Family
from calib.plan import CalibrationPlan
from calib.progress import Progress, Report
from calib.scheme import Scheme
from calib.smoother import Smoother


@dataclass(slots=True)
class Relay:
    """A layer's sink, which is told batch by batch who listens."""

    to: Sink | None = None

    def __call__(self, output: torch.Tensor) -> None:
        if self.to is not None:
            self.to(output)


@dataclass(slots=True)
class LayerWork:
    """``batches`` are token ids [b, s]; ``schemes`` what is really quantized (the plan's, less protected layers).

    ``trials`` keeps what measured choices need, ``store`` the calibration itself.
    """

    plan: CalibrationPlan
    source: QuantizedCheckpoint
    family: Family
    schemes: dict[str, Scheme]
    batches: list[torch.Tensor]
    store: LayerStore
    trials: LayerStore
    report: Report

    def model(self, layer: int, sink: Sink) -> Any:
        """Layer number ``layer`` as a model, its outputs going to ``sink``."""
        return one_layer(self.source.path, self.family, self.source.shards, layer, sink)

    def smoother(self, model: nn.Module, layer: int) -> Smoother:
        return Smoother(model, self.layer_plan(layer), self.layer_schemes(layer), self.family, self.source.shards)

    def prefix(self, layer: int) -> str:
        return f"{self.family.layers}.{layer}."

    def layer_schemes(self, layer: int) -> dict[str, Scheme]:
        """The schemes of one layer's modules that the method rounds."""
        prefix, raised = self.prefix(layer), self.plan.raised_schemes
        return {name: scheme for name, scheme in self.schemes.items() if name.startswith(prefix) and name not in raised}

    def layer_plan(self, layer: int) -> CalibrationPlan:
        """The plan as if the model were this layer."""
        prefix = self.prefix(layer)
        return self.plan.model_copy(update={
            "attentions": tuple(name for name in self.plan.attentions if name.startswith(prefix)),
            "modules": tuple(module for module in self.plan.modules if module.name.startswith(prefix))})

    def embed(self, store: LayerStore, stream: str, batches: Sequence[torch.Tensor], *, rounded: bool) -> None:
        """What layer 0 reads of a stream, where it does not lie there yet. ``rounded``: of the embedding in bf16."""
        for index, ids in enumerate(batches):
            if not store.has_hidden(stream, 0, index):
                store.put_hidden(stream, 0, index, embedded(self.source.path, self.family, self.source.shards, ids,
                                                            rounded=rounded))

    def within(self, stage: str, layer: int) -> Report:
        """Says that a layer begins; a listener for the steps inside it."""
        total, where = self.plan.num_layers, f"layer {layer + 1} of {self.plan.num_layers}"
        self.report(Progress(stage, layer, total, "layer", where))

        def inner(event: Progress) -> None:
            self.report(Progress(stage, layer, total, "layer", f"{where}: {event.stage}"))

        return inner
