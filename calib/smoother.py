"""Smoothing as steps: statistics, a strength tried and taken back, the finish. For whole models and for single layers.

A static activation scale follows from the statistics too: an input whose channel j was divided by s_j has amax_j / s_j.

The steps know only the modules in ``schemes``, so that a model of one layer goes through the same arithmetic as that
layer does inside the whole model, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from calib import quantizer
from calib.formats.hf import Shards
from calib.layers import Family
from calib.plan import CalibrationPlan
from calib.progress import Report, silent
from calib.scheme import Scheme
from calib.smoothing import fold, restore


def round_unquantized(model: nn.Module, schemes: Mapping[str, Scheme]) -> None:
    """What is written as bf16 is bf16 in memory too."""
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if name.removesuffix(".weight") not in schemes:
                parameter.copy_(parameter.to(torch.bfloat16))


@dataclass(slots=True)
class Smoother:
    """``source`` holds the original weights; ``amax`` is each module's largest input per channel [in]."""

    model: nn.Module
    plan: CalibrationPlan
    schemes: dict[str, Scheme]
    family: Family
    source: Shards
    amax: dict[str, torch.Tensor] = field(default_factory=dict)

    def collect(self, batches: Sequence[torch.Tensor], report: Report) -> None:
        """Attach quantizers and take statistics of every input."""
        quantizer.attach(self.model, self.schemes, self.plan.attentions, self.plan.kv, batches, report,
                         channel_statistics=True)
        self.amax = {module: quantizer.input_amax(self.model, module) for module in self.schemes}
        quantizer.check_inputs(self.amax)
        quantizer.set_activations(self.model, self.schemes)

    def adopt(self, amax: Mapping[str, torch.Tensor]) -> None:
        """Attach quantizers, with statistics that were taken before."""
        quantizer.attach(self.model, self.schemes, self.plan.attentions, self.plan.kv, (), silent,
                         channel_statistics=True)
        self.amax = {module: amax[module] for module in self.schemes}
        quantizer.set_activations(self.model, self.schemes)

    def apply(self, alpha: float) -> None:
        """Fold strength ``alpha`` into the original weights and round them to their grids."""
        restore(self.model, self.family, self.source)
        folded = fold(self.model, self.family, self.amax, alpha)
        for module, scheme in self.schemes.items():
            if scheme.activation is not None and not scheme.activation.dynamic:
                seen = self.amax[module] / folded[module] if module in folded else self.amax[module]
                quantizer.set_input_amax(self.model, module, seen.amax())
        round_unquantized(self.model, self.schemes)
        quantizer.recalibrate_weights(self.model, self.schemes)
        quantizer.project_weights(self.model, self.schemes)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Weights lie on their grids already, and the KV cache is no part of the choice: both quantizers pause."""
        with quantizer.disabled(self.model, [*self._kv(), *quantizer.weight_quantizers(self.schemes)]):
            yield

    def finish(self, batches: Sequence[torch.Tensor], report: Report) -> None:
        """Key and value scales of the smoothed model, then every scale checked."""
        if self._kv():
            with quantizer.disabled(self.model, quantizer.weight_quantizers(self.schemes)):
                quantizer.calibrate_kv(self.model, self.plan.attentions, batches, report)
        quantizer.check_scales(self.model, self.schemes, self.plan.attentions, self.plan.kv)

    def _kv(self) -> list[str]:
        return quantizer.kv_quantizers(self.plan.attentions) if self.plan.kv.quantized else []
