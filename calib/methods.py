"""The methods of a recipe, each a short story over modelopt's quantizers: max, smooth, awq_lite, measured choices.

A method leaves the model fake-quantized exactly as it will be written, so that whoever looks at it sees the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from calib import quantizer
from calib.awq import clipped_amax
from calib.formats.hf import Shards
from calib.grids import quantize_weight
from calib.layers import Family, natural_key
from calib.peak import give_back
from calib.plan import CalibrationPlan
from calib.progress import Progress, Report, silent
from calib.scheme import BF16, Scheme
from calib.smoother import Smoother, round_unquantized

#: Remembers a measured loss by name, or measures it: what makes a killed run go on where it was.
Measure = Callable[[str, Callable[[], float]], float]
SCORED_ROWS = 4


def mean_nll(model: nn.Module, tokens: torch.Tensor) -> float:
    """Mean negative log-likelihood, nats per token, of rows [n, s] given their own beginnings."""
    total, count = 0.0, 0
    with torch.inference_mode():
        for rows in tokens.split(SCORED_ROWS):
            give_back()
            logits = model(rows, use_cache=False).logits[:, :-1].float()
            total += functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
            count += rows[:, 1:].numel()
    return total / count


def find_scales(model: nn.Module, plan: CalibrationPlan, schemes: dict[str, Scheme], batches: Sequence[torch.Tensor],
                report: Report, family: Family) -> None:
    """The methods whose scales for a layer follow from that layer and its inputs alone (all but ``smooth``).

    ``model`` is the whole model, or one layer of it under its own name: each pass over ``batches`` then reads what the
    same pass gave in the layer before (``calib/layerwise.py``).
    """
    if plan.recipe.method == "awq_lite":
        run_awq(model, plan, schemes, batches, report, family)
    else:
        run_max(model, plan, schemes, batches, report)


def run_max(model: nn.Module, plan: CalibrationPlan, schemes: dict[str, Scheme], batches: Sequence[torch.Tensor],
            report: Report) -> None:
    """Scale = largest magnitude. Also the way to a quantized KV cache beside bf16 weights. Data only where needed."""
    needed = batches if plan.recipe.calibrates_activations or plan.kv.quantized else ()
    quantizer.attach(model, schemes, plan.attentions, plan.kv, needed, report)
    quantizer.check_scales(model, schemes, plan.attentions, plan.kv)
    round_unquantized(model, schemes)
    quantizer.project_weights(model, schemes)


def run_awq(model: nn.Module, plan: CalibrationPlan, schemes: dict[str, Scheme], batches: Sequence[torch.Tensor],
            report: Report, family: Family) -> None:
    """awq_lite's search, one scale for all readers of an input, the roundings that the export makes, clipping."""
    quantizer.attach(model, schemes, plan.attentions, plan.kv, batches, report, alpha_step=plan.recipe.alpha_step)
    magnitudes = quantizer.take_search(model, schemes)
    scales: dict[str, torch.Tensor] = {}
    for members in _readers(schemes, family, plan.num_layers):
        scales |= dict.fromkeys(members, quantizer.share_pre_quant_scale(model, members))
    _fold_into_norms(model, schemes, family, plan.num_layers)
    quantizer.settle(model, schemes)
    for index, module in enumerate(schemes if plan.recipe.clip_ratios else ()):
        report(Progress("clip weights", index, len(schemes), "module"))
        importance = (magnitudes[module] * scales[module]).square()
        quantizer.set_weight_amax(model, module, clipped_amax(
            _weight(model, module), importance, cast(int, plan.group_size), plan.recipe.clip_ratios))
    quantizer.check_scales(model, schemes, plan.attentions, plan.kv)
    quantizer.project_weights(model, schemes)


def _fold_into_norms(model: nn.Module, schemes: dict[str, Scheme], family: Family, num_layers: int) -> None:
    """What a norm's readers multiply their input by goes into the norm itself."""
    for layer in range(num_layers):
        for pair in family.smoothings:
            readers = [f"{family.layers}.{layer}.{name}" for name in pair.readers]
            if pair.kind == "norm" and readers[0] in schemes:
                quantizer.fold_into_norm(model, f"{family.layers}.{layer}.{pair.source}", readers, pair.offset)


def _readers(schemes: dict[str, Scheme], family: Family, num_layers: int) -> list[list[str]]:
    """The quantized modules, those that read one input together."""
    groups = [*family.fused, *((name,) for name in family.linears if not any(name in group for group in family.fused))]
    found = [[f"{family.layers}.{layer}.{name}" for name in group] for layer in range(num_layers) for group in groups]
    return [members for members in found if members[0] in schemes]


def _weight(model: nn.Module, module: str) -> torch.Tensor:
    return cast(torch.Tensor, model.get_submodule(module).weight).detach()


def run_smooth(model: nn.Module, plan: CalibrationPlan, schemes: dict[str, Scheme], batches: Sequence[torch.Tensor],
               report: Report, *, family: Family, source: Shards, choose: torch.Tensor, measure: Measure) -> float:
    """Statistics once, then each strength folded, measured on ``choose`` and taken back; the best one stays.

    Returns the chosen alpha. Equal losses go to the weaker smoothing.
    """
    smoother = Smoother(model, plan, schemes, family, source)
    smoother.collect(batches, report)

    def loss(alpha: float) -> float:
        smoother.apply(alpha)
        with smoother.measured():
            return mean_nll(model, choose)

    alphas = sorted(plan.recipe.alphas)
    losses: dict[float, float] = {}
    for index, alpha in enumerate(alphas if len(alphas) > 1 else []):
        report(Progress("choose smoothing", index, len(alphas), "strength"))
        losses[alpha] = measure(f"alpha {alpha:g}", lambda alpha=alpha: loss(alpha))  # type: ignore[misc]
        report(Progress("choose smoothing", index + 1, len(alphas), "strength"))
    best = min(alphas, key=lambda alpha: losses.get(alpha, 0.0))
    smoother.apply(best)
    smoother.finish(batches, report)
    return best


def choose_protected(model: nn.Module, plan: CalibrationPlan, family: Family, choose: torch.Tensor,
                     batches: Sequence[torch.Tensor], measure: Measure, report: Report) -> list[int]:
    """The ``protect`` decoder layers whose unquantized weights lower the loss on ``choose`` most.

    Measured with plain rounding on the recipe's grids, before any search; attaches quantizers to ``model``.
    """
    schemes = plan.layer_schemes
    quantizer.attach(model, schemes, plan.attentions, BF16, batches, silent)
    losses = []
    for layer in range(plan.num_layers):
        report(Progress("choose protected layers", layer, plan.num_layers, "layer"))
        names = [name for module in schemes if module.startswith(f"{family.layers}.{layer}.")
                 for name in quantizer.of_module(model, module)]
        if not names:  # kept whole: there is nothing to protect
            continue

        def loss(names: list[str] = names) -> float:
            with quantizer.disabled(model, names):
                return mean_nll(model, choose)

        losses.append((measure(f"protect layer {layer}", loss), layer))
    return sorted(layer for _, layer in sorted(losses)[:plan.recipe.protect])


def canonical_tensors(model: nn.Module, plan: CalibrationPlan, schemes: dict[str, Scheme]
                      ) -> Iterator[tuple[str, torch.Tensor]]:
    """The canonical stream of a fake-quantized model in memory, in natural order of names; a tied head is left out."""
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        if module in schemes:
            found |= _module_tensors(model, module, schemes[module])
        else:
            found[name] = partial(_in_bf16, parameter)
    if plan.kv.quantized:
        found |= {name: partial(_same, scale) for name, scale in quantizer.kv_scales(model, plan.attentions, plan.kv)}
    for name in sorted(found, key=natural_key):
        yield name, found[name]()


def _in_bf16(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to(torch.bfloat16)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _module_tensors(model: nn.Module, module: str, scheme: Scheme) -> dict[str, Callable[[], torch.Tensor]]:
    """Names of one quantized module's tensors, each with what computes it."""

    def scale() -> torch.Tensor:
        return quantizer.weight_scale(model, module, scheme.weight)

    found: dict[str, Callable[[], torch.Tensor]] = {
        f"{module}.weight": lambda: quantize_weight(scheme.weight, _weight(model, module), scale()),
        f"{module}.weight_scale": scale}
    if scheme.pre_quant_scale:
        found[f"{module}.pre_quant_scale"] = partial(quantizer.pre_quant_scale, model, module)
    activation = scheme.activation
    if activation is not None and not activation.dynamic:
        found[f"{module}.input_scale"] = partial(quantizer.input_scale, model, module, activation)
    return found
