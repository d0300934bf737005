"""4-bit linears for prefill: write the weight out in 16 bits once per pass, then use the library's matrix product.

At thousands of tokens the product is bound by arithmetic: 16-bit weights lose nothing against 4-bit ones, and the
library's kernel runs at the device's best rate. The price is traffic: a quarter of a 16-bit weight is read, all of it
is written and read again, about 7 ms a pass for an 8B model against some 330 ms of arithmetic at 16,384 tokens.

    scratch [n, k] (then x [m, k] for A8)    in the output's type, lies in ``workspace`` (size: ``mm_workspace``)

Rounding: q * scale is rounded to 16 bits (A8: code * scale of the activation as well), 2^-9 relative for bf16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engines.kernels.impl import KernelConfig, LinearShape, Packed
from engines.kernels.jit import gdc_launch, gdc_wait, launch_options
from engines.kernels.linear.int4_dot import load_scales, load_weights
from engines.kernels.linear.int4_layout import scales_per_load
from engines.kernels.linear.split_k import TICKETS

__all__ = ["launch_int4_mm", "mm_workspace"]

_ALIGN = 256
_BEGIN = 4 * TICKETS  # the workspace may be shared with split-K kernels, whose tickets must stay zero


@triton.jit(do_not_specialize=["n"])
def int4_unpack(w_ptr, s_ptr, out_ptr, n, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_K: tl.constexpr, PER_LOAD: tl.constexpr, A8: tl.constexpr, PDL: tl.constexpr):
    """out [n, K] = q * scale in out's type; grid (tiles of rows, tiles of inputs)."""
    GROUPS: tl.constexpr = (K + 4 * GROUP - 1) // (4 * GROUP) * 4
    first_tile = tl.program_id(0) * (BLOCK_N // 16)
    k0 = tl.program_id(1) * BLOCK_K
    tiles = (n + 15) // 16
    gdc_launch(PDL)
    w = load_weights(w_ptr, first_tile, tiles, k0, GROUPS * GROUP // 64, BLOCK_N, BLOCK_K, A8, False, True, False)
    s = load_scales(s_ptr, first_tile, tiles, k0 // GROUP, GROUPS, BLOCK_N, BLOCK_K // GROUP, PER_LOAD)
    if A8:
        s *= 0.0625
    value = tl.reshape(w, (BLOCK_N, BLOCK_K // GROUP, GROUP)).to(tl.float32) * s[:, :, None]
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col = k0 + tl.arange(0, BLOCK_K)
    gdc_wait(PDL)
    at = out_ptr + row.to(tl.int64)[:, None] * K + col[None, :]
    tl.store(at, tl.reshape(value, (BLOCK_N, BLOCK_K)).to(out_ptr.dtype.element_ty),
             mask=(row < n)[:, None] & (col < K)[None, :])


@triton.jit(do_not_specialize=["count"])
def int8_group_unpack(x_ptr, xs_ptr, out_ptr, count, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = code * scale of its group, over a flat run of whole groups; grid (blocks of BLOCK codes,)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gdc_launch(PDL)
    gdc_wait(PDL)
    x = tl.load(x_ptr + at, mask=at < count, other=0).to(tl.float32)
    s = tl.load(xs_ptr + at // GROUP, mask=at < count, other=0.0)
    tl.store(out_ptr + at, (x * s).to(out_ptr.dtype.element_ty), mask=at < count)


def mm_workspace(shape: LinearShape, a8: bool) -> int:
    """Bytes of the 16-bit scratch: split-K's tickets stay untouched, then the weight, and for A8 the activations."""
    weight = -(-2 * shape.n * shape.k // _ALIGN) * _ALIGN
    return _BEGIN + weight + (2 * shape.m * shape.k if a8 else 0)


def launch_int4_mm(x: torch.Tensor, packed: Packed, config: KernelConfig, out: torch.Tensor, *,
                   x_scale: torch.Tensor | None = None, workspace: torch.Tensor | None = None) -> None:
    """out [m, n] through a 16-bit scratch. ``config.meta``: BLOCK_N, BLOCK_K (multiple of 64 and of the group)."""
    n, k, m = packed.n, packed.k, out.shape[0]
    needed = mm_workspace(LinearShape(m, n, k, packed.group), x_scale is not None)
    if workspace is None or workspace.nbytes < needed:
        have = 0 if workspace is None else workspace.nbytes
        raise ValueError(f"the workspace has {have} bytes, this launch needs {needed}")
    raw = workspace.view(-1).view(torch.uint8)
    weight = raw[_BEGIN: _BEGIN + 2 * n * k].view(out.dtype).view(n, k)
    words, scales = packed.tensors["words"], packed.tensors["scales"]
    a8 = x_scale is not None
    block_n, block_k = config["BLOCK_N"], config["BLOCK_K"]
    int4_unpack[(triton.cdiv(n, block_n), triton.cdiv(k, block_k))](
        words, scales, weight, n, K=k, GROUP=packed.group, BLOCK_N=block_n,
        BLOCK_K=block_k, PER_LOAD=scales_per_load(scales.dtype), A8=a8, **launch_options(config))
    if x_scale is not None:
        wide = raw[needed - 2 * m * k: needed].view(out.dtype).view(m, k)
        int8_group_unpack[(triton.cdiv(m * k, 2048),)](x, x_scale, wide, m * k, GROUP=packed.group, BLOCK=2048,
                                                       **launch_options(config))
        x = wide
    bias = packed.tensors.get("bias")
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias.to(out.dtype), x, weight.t(), out=out)
