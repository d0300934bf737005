"""Weights that are rounded apart from a recipe's method: raised layers, the output head. One scale per channel.

The method (a search, smoothing, compensation) is for the recipe's own grid. A module on a finer one needs none of it:
in eight bits the largest magnitude is scale enough, and its input is left in 16 bits. So these modules take no part in
the method; they are rounded when it is done, as it left them (what was folded into their rows lies in them already).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from calib.errors import CalibrationDataError
from calib.grids import amax_scale, dequantize_weight, quantize_weight
from calib.scheme import Grid, Scheme

#: Module -> its canonical tensors by leaf name.
Rounded = dict[str, dict[str, torch.Tensor]]


def round_weight(weight: torch.Tensor, grid: Grid, module: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A weight [out, in] on ``grid`` by its largest magnitudes: its values in f32, its canonical tensors by leaf name.

    CalibrationDataError for a weight that is not finite, or all zero.
    """
    exact = weight.detach().to(torch.bfloat16).float()
    if not torch.isfinite(exact).all() or not exact.any():
        raise CalibrationDataError(f"{module} is {'all zero' if not exact.any() else 'not finite'}",
                                   "Such a weight cannot be quantized; keep this module in bf16.")
    scale = amax_scale(grid, exact)
    codes = quantize_weight(grid, exact, scale)
    return dequantize_weight(grid, codes, scale), {"weight": codes, "weight_scale": scale}


def round_apart(model: nn.Module, schemes: Mapping[str, Scheme]) -> Rounded:
    """Put the weights of ``schemes`` on their grids, in place."""
    found: Rounded = {}
    with torch.inference_mode():
        for module, scheme in schemes.items():
            weight: Any = model.get_submodule(module).weight
            values, found[module] = round_weight(weight, scheme.weight, module)
            weight.copy_(values)
    return found


def with_rounded(stream: Iterable[tuple[str, torch.Tensor]], rounded: Rounded) -> Iterator[tuple[str, torch.Tensor]]:
    """A canonical stream with those tensors in the places of their modules' weights."""
    for name, tensor in stream:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module in rounded:
            yield from ((f"{module}.{kind}", value) for kind, value in rounded[module].items())
        else:
            yield name, tensor
