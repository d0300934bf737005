"""The arithmetic of a Grid in torch: codes and scales to values and back, and fake quantization of activations.

Rounding is to nearest, ties to even (``torch.round``); integer codes are clamped to [-max, max] for activations and to
the whole code range for weights. All arithmetic is float32.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from calib.scheme import CODE_MAX, Grid

_INT_RANGE = {"int8": (-128, 127), "int4": (-8, 7)}
#: Weights are also multiplied in half precision; no weight of a model comes near its largest number.
_LARGEST = torch.finfo(torch.float16).max


def expand_scale(grid: Grid, scale: torch.Tensor, weight_shape: tuple[int, ...],
                 group_index: torch.Tensor | None = None) -> torch.Tensor:
    """A weight scale (or zero) of ``grid`` in a shape that broadcasts against the weight [out, in].

    ``group_index`` [in] (g_idx) names each column's group when columns were reordered.
    """
    rows, columns = weight_shape
    kind = grid.granularity
    if kind.kind == "channel":
        return scale[:, None]
    if kind.kind == "group":
        index = torch.arange(columns) // kind.size if group_index is None else group_index.long()
        return scale[:, index]
    if kind.kind == "block":
        return scale.repeat_interleave(kind.rows, 0)[:rows].repeat_interleave(kind.cols, 1)[:, :columns]
    return scale


def dequantize_weight(grid: Grid, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None,
                      group_index: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [out, in] = (codes - zero) * scale."""
    shape = tuple(codes.shape)
    values = codes.float()
    if zero is not None:
        values = values - expand_scale(grid, zero.float(), shape, group_index)
    return values * expand_scale(grid, scale.float(), shape, group_index)


def code_range(grid: Grid) -> tuple[int, int]:
    """Smallest and largest code of an integer weight grid; asymmetric codes begin at 0."""
    low, high = _INT_RANGE[grid.dtype]
    return (low, high) if grid.symmetric else (0, high - low)


def quantize_weight(grid: Grid, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None,
                    group_index: torch.Tensor | None = None) -> torch.Tensor:
    """Codes [out, in]: int8 (also for int4, unpacked) or float8_e4m3fn. ``zero`` (whole numbers) is added to them."""
    shape = tuple(weight.shape)
    scaled = weight.float() / expand_scale(grid, scale.float(), shape, group_index)
    if grid.dtype == "fp8_e4m3":
        return scaled.clamp(-CODE_MAX[grid.dtype], CODE_MAX[grid.dtype]).to(torch.float8_e4m3fn)
    codes = scaled.round()
    if zero is not None:
        codes = codes + expand_scale(grid, zero.float(), shape, group_index)
    return codes.clamp(*code_range(grid)).to(torch.int8)


def amax_scale(grid: Grid, weight: torch.Tensor) -> torch.Tensor:
    """f32 scale of a symmetric grid from the largest magnitudes; a part of zeros has the scale 1."""
    rows, columns = weight.shape
    kind, magnitudes = grid.granularity, weight.detach().float().abs()
    if kind.kind == "tensor":
        amax = magnitudes.amax()
    elif kind.kind == "channel":
        amax = magnitudes.amax(1)
    elif kind.kind == "group":
        amax = functional.pad(magnitudes, (0, -columns % kind.size)).unflatten(1, (-1, kind.size)).amax(2)
    elif kind.kind == "block":
        padded = functional.pad(magnitudes, (0, -columns % kind.cols, 0, -rows % kind.rows))
        amax = padded.unflatten(1, (-1, kind.cols)).unflatten(0, (-1, kind.rows)).amax((1, 3))
    else:
        raise ValueError(f"a weight cannot be scaled per {kind.kind}")
    return torch.where(amax > 0, amax / CODE_MAX[grid.dtype], torch.ones_like(amax))


def too_large(grid: Grid, scale: torch.Tensor) -> str:
    """What is wrong with weight scales whose largest code is no finite half-precision number; empty when nothing is."""
    worst = float(scale.max()) if scale.numel() else 0.0
    if worst * CODE_MAX[grid.dtype] <= _LARGEST:
        return ""
    return (f"holds {worst:.3g}: weights on {grid} would reach {worst * CODE_MAX[grid.dtype]:.3g}, half precision "
            f"ends at {_LARGEST:.0f}")


def fake_quantize(grid: Grid, values: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Round ``values`` [..., n] to ``grid`` and back, float32. ``scale`` [] for a static grid, None for a dynamic one.

    Dynamic scales are amax/max over the whole last axis (token) or over groups of it, of which the last may be smaller.
    """
    shape = values.shape
    if grid.granularity.kind == "group":
        size = grid.granularity.size
        values = functional.pad(values, (0, -shape[-1] % size)).unflatten(-1, (-1, size))
    limit = CODE_MAX[grid.dtype]
    if grid.dynamic:
        over = tuple(range(values.dim())) if grid.granularity.kind == "tensor" else -1
        amax = values.abs().amax(over, keepdim=True)
        scale = torch.where(amax > 0, amax, torch.ones_like(amax)) / limit
    if scale is None:
        raise ValueError(f"a static grid {grid} needs a scale")
    scaled = (values / scale).clamp(-limit, limit)
    rounded = scaled.to(torch.float8_e4m3fn).float() if grid.dtype == "fp8_e4m3" else scaled.round()
    rounded = rounded * scale
    return rounded.flatten(-2)[..., :shape[-1]] if grid.granularity.kind == "group" else rounded
