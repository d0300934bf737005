"""Residual add + RMSNorm + activation quantization in one pass over a row.

    h        = bf16(residual + x)                 (written back: the residual stream of the next layer)
    y        = h * rsqrt(mean(h^2) + eps) * weight * pre_quant_scale
    out      = y, or its codes and scales (``jit.ActQuant``)

One program holds one row [n] in registers: every byte is read once and written once. The norm sees ``h`` *after* its
rounding, as it is what the residual stream stores: any later re-read computes the same row.

At 1 to 256 tokens the bytes are nothing (16 KiB a row) and latency is everything: a load, one reduction across warps,
a store. So constants (weight, scales) are loaded before PDL's wait, both row loads are issued together, and the
per-token amax needs no reduction of its own: max|y| = rsqrt(..) * max|h * weight|, found with the sum of squares.

Without ``residual`` it is the first norm of the model (``residual_out`` then stores x itself if given). With ``rows``
[r] it is the last one: output row i is made from row rows[i] of x and residual, so that only rows that will be sampled
are normalised. Gemma's (1 + weight) is folded into ``weight`` at build time (float32 weights are fine).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engines.kernels.impl import DeviceFacts, KernelConfig
from engines.kernels.jit import (
    ActQuant,
    gdc_launch,
    gdc_wait,
    launch_options,
    next_pow2,
    scale_at,
    store_act,
    sum_and_max,
)
from engines.kernels.quantize import check_act, store_act_twin


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def norm_kernel(x_ptr, residual_ptr, residual_out_ptr, rows_ptr, weight_ptr, pre_quant_ptr, out_ptr, scales_ptr,
                input_scale_ptr, x_stride, residual_stride, residual_out_stride, out_stride, num_groups, n, eps,
                QUANT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
                FENCE: tl.constexpr) -> None:
    """One program a row."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    if not FENCE:
        gdc_launch(PDL)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if pre_quant_ptr is not None:
        weight = weight * tl.load(pre_quant_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    input_scale = scale_at(input_scale_ptr)
    gdc_wait(PDL)
    if FENCE:
        gdc_launch(PDL)
    if rows_ptr is not None:
        source = tl.load(rows_ptr + row).to(tl.int64)
    else:
        source = tl.cast(row, tl.int64)
    x = tl.load(x_ptr + source * x_stride + cols, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + source * residual_stride + cols, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    if residual_out_ptr is not None:
        tl.store(residual_out_ptr + tl.cast(row, tl.int64) * residual_out_stride + cols, x, mask=mask)
    h = x.to(tl.float32)
    y = h * weight
    if QUANT == 2 or QUANT == 3:
        squares, amax = sum_and_max(h * h, tl.abs(y))
    else:
        squares, amax = tl.sum(h * h, 0), 0.0
    rstd = tl.rsqrt(squares / n + eps)
    store_act(y * rstd, amax * rstd, row, cols, mask, 0, n, out_ptr, out_stride, scales_ptr, num_groups, input_scale,
              QUANT, GROUP, BLOCK)


def candidates(n: int, device: DeviceFacts) -> Sequence[KernelConfig]:
    """Warps to try for rows of ``n``; the first is the default (16 elements, two 16-byte loads, a thread)."""
    block = next_pow2(n)
    best = min(16, max(1, block // 512))
    sizes = dict.fromkeys([best, *(w for w in (4, 8, 16) if w * 32 <= block)])
    return [KernelConfig.of("row", num_warps=w, pdl=device.capability >= 90) for w in sizes]


def _check(x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None, residual_out: torch.Tensor | None,
           rows: torch.Tensor | None, weight: torch.Tensor) -> tuple[int, int]:
    m, n = out.shape
    if x.shape[1] != n or weight.shape != (n,) or (rows is None and x.shape[0] != m) or (
            rows is not None and rows.shape != (m,)):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and out {tuple(out.shape)} do not fit")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"residual {tuple(residual.shape)} {residual.dtype} must be like x {tuple(x.shape)} {x.dtype}")
    if residual_out is not None and (residual_out.shape != out.shape or residual_out.dtype != x.dtype):
        raise ValueError(f"residual_out must be {tuple(out.shape)} {x.dtype}, found {tuple(residual_out.shape)}")
    if rows is not None and residual_out is not None:
        raise ValueError("rows gathers for the last norm, which has no residual_out")
    return m, n


def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: KernelConfig, *, eps: float,
           residual: torch.Tensor | None = None, residual_out: torch.Tensor | None = None,
           rows: torch.Tensor | None = None, pre_quant_scale: torch.Tensor | None = None,
           quant: ActQuant = ActQuant.NONE, group: int = 0, input_scale: torch.Tensor | None = None,
           scales: torch.Tensor | None = None, fence: bool = False) -> torch.Tensor:
    """Fill ``out`` [m, n] from ``x`` [m, n] (``[t, n]`` with ``rows`` [m]); module docstring. Graph safe.

    ``residual_out`` may be ``residual`` itself. ``fence``: with PDL, dependents start only after this kernel's own
    wait, so that whatever they read before theirs, this kernel's output apart, is complete (see ``attention_rope``).
    Raises ValueError on a misfit.
    """
    m, n = _check(x, out, residual, residual_out, rows, weight)
    check_act(out, m, n, quant, group, input_scale, scales)
    if m:
        norm_kernel[(m,)](x, residual, residual_out, rows, weight, pre_quant_scale, out, scales, input_scale,
                          x.stride(0), 0 if residual is None else residual.stride(0),
                          0 if residual_out is None else residual_out.stride(0), out.stride(0),
                          n // group if group else 0, n, eps, QUANT=int(quant), GROUP=group, BLOCK=next_pow2(n),
                          FENCE=fence, **launch_options(config))
    return out


def twin(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: KernelConfig | None = None, *, eps: float,
         residual: torch.Tensor | None = None, residual_out: torch.Tensor | None = None,
         rows: torch.Tensor | None = None, pre_quant_scale: torch.Tensor | None = None,
         quant: ActQuant = ActQuant.NONE, group: int = 0, input_scale: torch.Tensor | None = None,
         scales: torch.Tensor | None = None) -> torch.Tensor:
    """The same in plain torch, float32 inside."""
    _check(x, out, residual, residual_out, rows, weight)
    if rows is not None:
        x = x[rows.long()]
        residual = None if residual is None else residual[rows.long()]
    h = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    if residual_out is not None:
        residual_out.copy_(h)
    wide = h.float()
    factor = weight.float() if pre_quant_scale is None else weight.float() * pre_quant_scale.float()
    y = wide * factor * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    store_act_twin(y, out, quant, group, input_scale, scales)
    return out
