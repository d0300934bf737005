"""Codes found layer by layer, from the inputs that the already rounded layers give: GPTQ, folded AWQ, fp8 blocks.

The methods that modelopt does not have, or has in no form that others load. One decoder layer at a time: its linears'
inputs are watched (G = mean of x x^T and mean |x|, one pair for all readers of an input), its weights are folded,
rounded and put back dequantized, and then the calibration rows pass through it as it now is, so the next layer is
fitted to what it will really get. Memory: the rows' hidden states and one layer's Gram matrices, beside the model.

What comes out are canonical tensors, and the model in memory is fake-quantized by the very function that
``calib.model.load_model`` uses on a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from calib.awq_fold import search_and_fold
from calib.errors import CalibrationDataError
from calib.gptq import Rounded, gptq
from calib.grids import amax_scale, quantize_weight
from calib.kv import FAKE_KV, calibrate_kv
from calib.layers import Family, natural_key
from calib.model import place_module
from calib.plan import CalibrationPlan
from calib.progress import Progress, Report
from calib.ranges import searched_ranges
from calib.recipe import Recipe
from calib.scheme import Grid, Scheme

Tensors = dict[str, torch.Tensor]
#: Layouts that store float16 scales.
_HALF = ("awq", "gptq")


@dataclass(slots=True)
class Solved:
    """Module -> canonical tensors by leaf name (attention modules: their KV scales); what was chosen, as evidence."""

    tensors: dict[str, Tensors] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)

    def stream(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The canonical stream, in natural order of names: what is not here is taken from ``model``, in bf16."""
        names = {name: parameter for name, parameter in model.named_parameters()
                 if "weight" not in self.tensors.get(name.rpartition(".")[0], {}) or name.endswith(".bias")}
        found = {f"{module}.{leaf}": tensor for module, tensors in self.tensors.items()
                 for leaf, tensor in tensors.items()}
        for name in sorted({*names, *found}, key=natural_key):
            yield name, found[name] if name in found else names[name].detach().to(torch.bfloat16)


@dataclass(slots=True)
class _Seen:
    """What was seen of one input [.., in]: sums of x x^T and |x| over tokens."""

    gram: torch.Tensor
    magnitude: torch.Tensor
    tokens: int = 0

    def add(self, x: torch.Tensor) -> None:
        rows = x.flatten(0, -2).float()
        self.gram.addmm_(rows.T, rows)
        self.magnitude += rows.abs().sum(0)
        self.tokens += len(rows)

    def means(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.tokens or not torch.isfinite(self.gram).all() or not self.gram.any():
            what = "saw no calibration data" if not self.tokens else "had inputs that are all zero or not finite"
            raise CalibrationDataError(f"{module} {what}", "Give more calibration texts, or keep this module in bf16.")
        return self.gram / self.tokens, self.magnitude / self.tokens


def run_solved(model: nn.Module, plan: CalibrationPlan, schemes: dict[str, Scheme], batches: Sequence[torch.Tensor],
               report: Report, family: Family) -> Solved:
    """Round every module of ``schemes``, in place, and KV scales where the plan has them. CalibrationDataError and
    HessianError name the module."""
    solver = _Solver(model, plan, schemes, family, report)
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
        if plan.recipe.calibrates_activations:
            solver.by_data(batches)
        else:
            solver.at_once()
    if plan.kv.quantized:
        report(Progress("calibrate KV cache", 0, 1, "model"))
        for attention, scales in calibrate_kv(model, plan.attentions, batches, plan.kv).items():
            solver.solved.tensors[attention] = scales
            place_module(model, attention, scales, None, plan.kv)
        cast(Any, model).config._attn_implementation = FAKE_KV
    return solver.solved


class _Solver:
    def __init__(self, model: nn.Module, plan: CalibrationPlan, schemes: dict[str, Scheme], family: Family,
                 report: Report) -> None:
        self.model, self.plan, self.schemes, self.family, self.report = model, plan, schemes, family, report
        self.recipe: Recipe = plan.recipe
        self.layers = cast(nn.ModuleList, model.get_submodule(family.layers))
        self.half = plan.layout in _HALF
        self.solved = Solved()
        self.inputs = [*family.fused, *((name,) for name in family.linears
                                        if not any(name in group for group in family.fused))]

    def weight(self, module: str) -> torch.Tensor:
        return cast(torch.Tensor, self.model.get_submodule(module).weight)

    def put(self, found: dict[str, Tensors]) -> None:
        """Keep tensors of modules and put them into the model."""
        for module, tensors in found.items():
            scheme = self.schemes[module]
            scale = tensors["weight_scale"]
            if not torch.isfinite(scale).all() or not (scale > 0).all():
                raise CalibrationDataError(f"{module} has the scale {float(scale.max()):g}",
                                           "A non-finite weight cannot be quantized; keep this module in bf16.")
            if not tensors["weight"].float().any() and tensors.get("weight_zero") is None:
                raise CalibrationDataError(f"{module} has the scale 0", "A weight of zeros cannot be quantized; keep "
                                           "this module in bf16.")
            place_module(self.model, module, tensors, scheme, self.plan.kv)
            self.solved.tensors[module] = tensors

    def at_once(self) -> None:
        """Scales from the weights alone."""
        for index, module in enumerate(self.schemes):
            self.report(Progress("round weights", index, len(self.schemes), "module"))
            self.put({module: _by_amax(self.schemes[module].weight, self.weight(module))})

    def by_data(self, batches: Sequence[torch.Tensor]) -> None:
        """Layer by layer, each on what the layers before it now give."""
        calls, states = _calls(self.model, self.layers, batches)
        for index, (number, layer) in enumerate(self.layers.named_children()):
            self.report(Progress("fit layers", index, len(self.layers), "layer"))
            members = {group: [f"{self.family.layers}.{number}.{name}" for name in group] for group in self.inputs}
            wanted = {group: names for group, names in members.items() if names[0] in self.schemes}
            run = _runner(layer, calls[index], states)
            if wanted:
                self._fit(number, layer, wanted, run)
            states = run()

    def _fit(self, number: str, layer: nn.Module, wanted: dict[tuple[str, ...], list[str]],
             run: Callable[[], list[torch.Tensor]]) -> None:
        seen = _watched(layer, list(wanted), run)
        means = {group: seen[group].means(names[0]) for group, names in wanted.items()}
        grams = {group: gram for group, (gram, _) in means.items()}
        if self.recipe.method == "awq":
            for pair in self.family.smoothings:
                group = next((group for group in wanted if set(group) == set(pair.readers)), None)
                if group is None:
                    continue
                grid = self.schemes[wanted[group][0]].weight
                factors, alpha = search_and_fold(layer, pair, grid, grams[group], means[group][1],
                                                 cast(float, self.recipe.alpha_step))
                grams[group] = grams[group] / factors[:, None] / factors
                self.solved.evidence[f"alpha {number} {pair.readers[0]}"] = round(alpha, 4)
        for group, names in wanted.items():
            self.put(self._rounded(names, grams[group]))

    def _rounded(self, names: list[str], gram: torch.Tensor) -> dict[str, Tensors]:
        """All readers of one input as one stacked matrix: they share its Gram matrix."""
        weight, grid = torch.cat([self.weight(name) for name in names]), self.schemes[names[0]].weight
        ratios, damping = self.recipe.clip_ratios or (1.0,), self.recipe.damping
        ranges = None if self.recipe.method == "gptq" else searched_ranges(grid, weight, ratios, gram=gram,
                                                                           half=self.half)
        if damping is not None:
            found = gptq(grid, weight, gram, damping=damping, order=self.recipe.act_order, ratios=ratios, ranges=ranges,
                         half=self.half, module=names[0])
            if found.damping != damping:
                self.solved.evidence[f"damping {names[0]}"] = found.damping
        else:
            assert ranges is not None
            found = Rounded(quantize_weight(grid, weight, ranges.scale, ranges.zero), *ranges, None, 0.0)
        rows = [self.weight(name).shape[0] for name in names]
        parts = {"weight": found.codes, "weight_scale": found.scale, "weight_zero": found.zero}
        split = {leaf: tensor.split(rows) for leaf, tensor in parts.items() if tensor is not None}
        made = {name: {leaf: tensors[at].contiguous() for leaf, tensors in split.items()}
                for at, name in enumerate(names)}
        if found.g_idx is not None:
            for tensors in made.values():
                tensors["g_idx"] = found.g_idx.clone()  # a file holds one for each module
        return made


def _by_amax(grid: Grid, weight: torch.Tensor) -> Tensors:
    scale = amax_scale(grid, weight)
    return {"weight": quantize_weight(grid, weight, scale), "weight_scale": scale}


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _calls(model: nn.Module, layers: nn.ModuleList, batches: Sequence[torch.Tensor]
           ) -> tuple[list[list[Call]], list[torch.Tensor]]:
    """What each layer is called with beside hidden states, for each batch; and what enters the first layer."""
    calls: list[list[Call]] = [[] for _ in layers]
    states: list[torch.Tensor] = []

    def watch(index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if index == 0:
                states.append(args[0])
            calls[index].append((args[1:], kwargs))
        return hook

    handles = [layer.register_forward_pre_hook(watch(index), with_kwargs=True) for index, layer in enumerate(layers)]
    try:
        for batch in batches:
            cast(Any, model).model(batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return calls, states


def _runner(layer: nn.Module, calls: Sequence[Call], states: Sequence[torch.Tensor]
            ) -> Callable[[], list[torch.Tensor]]:
    """Runs every batch through the layer as it is when called."""
    def run() -> list[torch.Tensor]:
        outs = [layer(state, *rest, **kwargs) for state, (rest, kwargs) in zip(states, calls, strict=True)]
        return [out[0] if isinstance(out, tuple) else out for out in outs]
    return run


def _watched(layer: nn.Module, groups: Sequence[tuple[str, ...]], run: Callable[[], list[torch.Tensor]]
             ) -> dict[tuple[str, ...], _Seen]:
    """Statistics of the input that each group of linears reads together."""
    seen: dict[tuple[str, ...], _Seen] = {}
    handles = []
    for group in groups:
        module = layer.get_submodule(group[0])
        width = cast(torch.Tensor, module.weight).shape[1]
        seen[group] = _Seen(torch.zeros(width, width), torch.zeros(width))
        handles.append(module.register_forward_pre_hook(lambda _, args, one=seen[group]: one.add(args[0])))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen
