"""The arithmetic of a Grid in torch: codes and scales to values and back, and fake quantization of activations.

Rounding is to nearest, ties to even (``torch.round``); integer codes are clamped to [-max, max] for activations and to
the whole code range for weights. All arithmetic is float32.
"""

from __future__ import annotations

import torch

from calib.scheme import CODE_MAX, Grid

_INT_RANGE = {"int8": (-128, 127), "int4": (-8, 7)}


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


def quantize_weight(grid: Grid, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes of a symmetric grid: int8 (also for int4, unpacked) or float8_e4m3fn, [out, in]."""
    scaled = weight.float() / expand_scale(grid, scale.float(), tuple(weight.shape))
    if grid.dtype == "fp8_e4m3":
        return scaled.clamp(-CODE_MAX[grid.dtype], CODE_MAX[grid.dtype]).to(torch.float8_e4m3fn)
    low, high = _INT_RANGE[grid.dtype]
    return scaled.round().clamp(low, high).to(torch.int8)


def fake_quantize(grid: Grid, values: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Round ``values`` [..., n] to ``grid`` and back, float32. ``scale`` [] for a static grid, None for a dynamic one.

    Dynamic scales are amax/max over the whole last axis (token) or over groups of it.
    """
    shape = values.shape
    if grid.granularity.kind == "group":
        values = values.reshape(*shape[:-1], -1, grid.granularity.size)
    limit = CODE_MAX[grid.dtype]
    if grid.dynamic:
        over = tuple(range(values.dim())) if grid.granularity.kind == "tensor" else -1
        amax = values.abs().amax(over, keepdim=True)
        scale = torch.where(amax > 0, amax, torch.ones_like(amax)) / limit
    if scale is None:
        raise ValueError(f"a static grid {grid} needs a scale")
    scaled = (values / scale).clamp(-limit, limit)
    rounded = scaled.to(torch.float8_e4m3fn).float() if grid.dtype == "fp8_e4m3" else scaled.round()
    return (rounded * scale).reshape(shape)
