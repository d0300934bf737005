"""W4A8 on the 16-bit matrix instructions: ``int4_dot`` as W4A16 has it, for words of order A8 and int8 activations.

``int4_dot``'s own A8 body multiplies int8 by int8, at twice the rate of 16 bits, but pays 192 instructions a thread and
step of a 128 x 128 tile to bring int32 sums to fp32 under both scales; W4A16 pays 64. Here a small kernel widens the
activations to 16 bits once, with their scales multiplied in if wanted, and ``int4_dot`` reads the same stored words as
16-bit numbers, straight into the instruction's registers:

* a nibble's place gives its row and its place in k: ``h = p % 2``, ``e = p // 2`` (``int4_layout``, order A8). A16's
  extraction takes nibble ``p = h + 2 e1 + 4 e0`` into slot (h, e1, e0), so the slot holds ``e = e1 + 2 e0``;
* flipping a two's complement nibble's sign bit gives q + 8, which is what A16 stores: that flip joins the mask in one
  ``lop3``, so widening costs what it costs there;
* slot (h, e1, e0) of word i = 2 i2 + i1 in lane (r, c) therefore holds the weight of ``k = 64 chunk + 32 i2 + 8 c +
  4 i1 + e1 + 2 e0`` where the instruction's operand has column ``64 chunk + 32 i2 + 16 i1 + 8 e1 + 2 c + e0``. A sum
  does not mind the order of its terms: the widened activations stand in the order of the columns.

    wide    [m, k] in the output's type   wide[t, 32 j + 16 i1 + 8 e1 + 2 c + e0] = x[t, 32 j + 8 c + 4 i1 + e1 + 2 e0]
    scales  float32 [k / group, tokens]   x_scale turned over, padded to whole token tiles: neighbouring columns of the
                                          result are neighbours in memory (used by FOLD 0 only)

FOLD says where the two scales go:

    0   the group's fp32 sum times scale[row] * x_scale[token]: exact codes, and every sum below 2^24 exact: the same
        bits as ``dot``'s int32 sums
    1   both before the sum, each rounded to 16 bits: one accumulator over all of k
    2   x_scale into ``wide`` (rounded to 16 bits), the weight's after the sum: as cheap a step as W4A16's

Workspace: split-K's tickets, which stay zero, then split-K's partial sums, ``wide`` and ``scales``. The price is one
more launch a linear and 2 m k bytes written and read again, mostly in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engines.kernels.impl import KernelConfig, LinearShape, Packed
from engines.kernels.jit import gdc_launch, gdc_wait, launch_options, next_pow2
from engines.kernels.linear.int4_dot import dot_workspace, launch_int4_dot
from engines.kernels.linear.int4_layout import Order
from engines.kernels.linear.split_k import scratch_bytes, scratch_view

__all__ = ["dot16_workspace", "launch_int4_dot16"]

_ALIGN = 256
_BLOCK = 2048


@triton.jit(do_not_specialize=["stride"])
def int8_group_widen(x_ptr, xs_ptr, wide_ptr, scales_ptr, stride, K: tl.constexpr, GROUP: tl.constexpr,
                     BLOCK: tl.constexpr, FOLD: tl.constexpr, PDL: tl.constexpr) -> None:
    """Codes [m, K] -> ``wide`` [m, K], times their scale (FOLD) or with ``scales`` [K / GROUP, stride].

    Grid (m, blocks of BLOCK). BLOCK is a multiple of GROUP and K of 32.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = place // 32 * 32 + place % 8 // 2 * 8 + place % 32 // 16 * 4 + place % 16 // 8 + place % 2 * 2
    gdc_launch(PDL)
    gdc_wait(PDL)
    x = tl.load(x_ptr + row * K + source, mask=place < K, other=0).to(tl.float32)
    group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    scale = tl.load(xs_ptr + row * (K // GROUP) + group, mask=group < K // GROUP, other=0.0)
    if FOLD:
        x = tl.reshape(tl.reshape(x, (BLOCK // GROUP, GROUP)) * scale[:, None], (BLOCK,))
    else:
        tl.store(scales_ptr + group * stride + row, scale, mask=group < K // GROUP)
    tl.store(wide_ptr + row * K + place, x.to(wide_ptr.dtype.element_ty), mask=place < K)


def _sizes(shape: LinearShape, config: KernelConfig) -> tuple[int, int, int]:
    """Bytes behind the tickets: partial sums, ``wide``, ``scales``; each begins at a multiple of _ALIGN."""
    split = dot_workspace(shape, config)
    tokens = triton.cdiv(shape.m, config["BLOCK_M"]) * config["BLOCK_M"]
    sizes = (split - scratch_bytes(0) if split else 0, 2 * shape.m * shape.k, 4 * (shape.k // shape.group) * tokens)
    partials, wide, scales = (triton.cdiv(size, _ALIGN) * _ALIGN for size in sizes)
    return partials, wide, scales


def dot16_workspace(shape: LinearShape, config: KernelConfig) -> int:
    """Bytes of workspace this launch needs."""
    return scratch_bytes(sum(_sizes(shape, config)))


def launch_int4_dot16(x: torch.Tensor, packed: Packed, config: KernelConfig, out: torch.Tensor, *,
                      x_scale: torch.Tensor, workspace: torch.Tensor | None = None) -> None:
    """out [m, n] from int8 codes x [m, k] with ``x_scale`` float32 [m, k / group]. ``config.meta``: as ``dot``'s.

    FOLD as in the module docstring; BLOCK_K is the group unless FOLD is 1.
    """
    m, k, group = out.shape[0], packed.k, packed.group
    partials, wide, scales = _sizes(LinearShape(m, packed.n, k, group), config)
    scratch = scratch_view(workspace, partials + wide + scales)[partials:]
    widened = scratch[:2 * m * k].view(out.dtype).view(m, k)
    turned = scratch[wide:].view(torch.float32)
    block = min(_BLOCK, next_pow2(k))
    stride = triton.cdiv(m, config["BLOCK_M"]) * config["BLOCK_M"]
    int8_group_widen[(m, triton.cdiv(k, block))](
        x, x_scale, widened, turned, stride, K=k, GROUP=group, BLOCK=block, FOLD=config["FOLD"] > 0,
        **launch_options(KernelConfig.of("widen", num_warps=4, pdl=config.pdl)))
    launch_int4_dot(widened, packed, config, out, order=Order.A8, x_scale=turned, workspace=workspace)
