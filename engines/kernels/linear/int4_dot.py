"""4-bit linears for a batch of tokens (9 ... 512), and for any number where there is no inline assembly.

    out[t, row] = sum over groups g of  scale[row, g] * sum over k in g of  q[row, k] * x[t, k]

A program owns ``BLOCK_N`` rows (weights stand on the matrix instruction's 64-wide side) and ``BLOCK_M`` tokens. Each
step takes one group of inputs, or ``BLOCK_K`` of them when FOLD is set:

    words   [tiles, chunks, lanes]  the storage of ``int4_layout``, loaded as it lies
    weights [BLOCK_N, BLOCK_K]      widened by shifts and masks (2 instructions a weight), put in place by a permutation
                                    of axes; the order of storage is that of the instruction's register operand, so
                                    this costs no traffic
    x       [BLOCK_K, BLOCK_M]      through shared memory, pipelined
    sum     [BLOCK_N, BLOCK_M]      fp32; the group's part is scaled in fp32 and added

FOLD (A16 only) multiplies the scale into the weight first, rounded to x's type: one accumulator instead of two and no
wait at the end of each group, at the price of that rounding (2^-9 relative for bf16, the same as dequantizing to bf16).
``SPLIT_K`` as in ``split_k``. All arithmetic is plain Triton, so the interpreter runs it; there weights and activations
are fp32 in the dot (bf16 is wrong there).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engines.kernels.impl import KernelConfig, LinearShape, Packed
from engines.kernels.jit import INTERPRETED, gdc_launch, gdc_wait, launch_options
from engines.kernels.linear.int4_layout import scales_per_load
from engines.kernels.linear.split_k import (
    is_last_split,
    split_k_bytes,
    split_k_views,
    store_partial,
    sum_partials,
)

__all__ = ["dot_workspace", "launch_int4_dot", "load_scales", "load_weights"]


@triton.jit
def load_weights(w_ptr, first_tile, tiles, k0, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                 A8: tl.constexpr, WIDE: tl.constexpr, FP16: tl.constexpr) -> tl.tensor:
    """Codes of BLOCK_N rows x BLOCK_K inputs from k0: bf16, fp16 (FP16), fp32 (WIDE) or, for A8, int8 16 q.

    ``w_ptr`` points to the words (A16) or to their bytes (A8). BLOCK_K is 32 or a multiple of 64.

    A16: two weights at a time, as they lie in a word, and tiles next to lanes: warps are dealt tiles, as the matrix
    instruction deals rows to warps. What comes out *is* its register operand: nothing passes through shared memory.
    """
    TILES: tl.constexpr = BLOCK_N // 16
    PART: tl.constexpr = 4 if A8 else 1  # pieces of a word
    HALVES: tl.constexpr = 1 if BLOCK_K == 32 else 2
    STEP: tl.constexpr = BLOCK_K // 32 // HALVES
    if A8:
        tile = tl.minimum(first_tile + tl.arange(0, TILES), tiles - 1)[:, None, None, None]
        chunk = (k0 // 64 + tl.arange(0, STEP))[None, :, None, None]
    else:
        tile = tl.minimum(first_tile + tl.arange(0, TILES), tiles - 1)[None, :, None, None]
        chunk = (k0 // 64 + tl.arange(0, STEP))[:, None, None, None]
    lane = tl.arange(0, 32)[None, None, :, None]
    piece = tl.arange(0, 2 * PART * HALVES)[None, None, None, :]
    inner = chunk * (128 * PART) + lane * (4 * PART) + piece
    if HALVES == 1:
        inner += k0 % 64 // 32 * (2 * PART)
    w = tl.load(w_ptr + tile * (CHUNKS * 128 * PART) + inner)
    if A8:
        both = tl.join(w << 4, w & -16)
        both = tl.reshape(both, (TILES, STEP, 8, 4, HALVES, 2, 4, 2))  # tile chunk r c i2 i1 e h
        values = tl.reshape(tl.permute(both, (0, 7, 2, 1, 4, 3, 5, 6)), (BLOCK_N, BLOCK_K))
    else:
        low = tl.join(w & 0x000F000F, (w >> 4) & 0x000F000F)
        high = tl.join((w >> 8) & 0x000F000F, (w >> 12) & 0x000F000F)
        pairs = tl.join(low, high)  # ... h, e1
        if not WIDE:
            pairs = pairs | (0x64006400 if FP16 else 0x43004300)
        codes = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))  # ... e0
        if WIDE:
            values = codes.to(tl.float32) - 8.0
        elif FP16:
            values = codes.to(tl.float16, bitcast=True) - 1032.0
        else:
            values = codes.to(tl.bfloat16, bitcast=True) - 136.0
        values = tl.reshape(values, (STEP, TILES, 8, 4, HALVES, 2, 2, 2, 2))  # chunk tile r c i2 i1 h e1 e0
        values = tl.reshape(tl.permute(values, (1, 6, 2, 0, 4, 5, 7, 3, 8)), (BLOCK_N, BLOCK_K))
    return values


@triton.jit
def load_scales(s_ptr, first_tile, tiles, g0, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
                PER_LOAD: tl.constexpr) -> tl.tensor:
    """Scales of BLOCK_N rows for STEP groups from g0, fp32 [BLOCK_N, STEP]."""
    row = tl.arange(0, BLOCK_N)[:, None]
    tile = tl.minimum(first_tile + row // 16, tiles - 1)
    group = (g0 + tl.arange(0, STEP))[None, :]
    at = (tile * (GROUPS // PER_LOAD) + group // PER_LOAD) * (16 * PER_LOAD)
    return tl.load(s_ptr + at + (row % 8) * (2 * PER_LOAD) + group % PER_LOAD * 2 + row % 16 // 8).to(tl.float32)


@triton.jit
def _store_out(acc, bias_ptr, y_ptr, row, token, m, n, HAS_BIAS: tl.constexpr) -> None:
    """acc [rows, tokens] (+ bias [n]) -> y [m, n]."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    at = y_ptr + token.to(tl.int64)[None, :] * n + row[:, None]
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=(row < n)[:, None] & (token < m)[None, :])


@triton.jit(do_not_specialize=["m", "n"])
def int4_dot(x_ptr, xs_ptr, w_ptr, s_ptr, bias_ptr, y_ptr, partial_ptr, ticket_ptr, m, n, K: tl.constexpr,
             GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
             SPLIT_K: tl.constexpr, FOLD: tl.constexpr, STAGES: tl.constexpr, PER_LOAD: tl.constexpr, A8: tl.constexpr,
             WIDE: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr):
    """Grid (tiles of rows, SPLIT_K, tiles of tokens)."""
    FP16: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    GROUPS: tl.constexpr = (K + 4 * GROUP - 1) // (4 * GROUP) * 4
    CHUNKS: tl.constexpr = GROUPS * GROUP // 64
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PER_SPLIT: tl.constexpr = (STEPS + SPLIT_K - 1) // SPLIT_K
    first_tile = tl.program_id(0) * (BLOCK_N // 16)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    tiles = (n + 15) // 16
    here = tl.minimum(token, m - 1)
    x_rows = x_ptr + here.to(tl.int64)[None, :] * K
    begin = tl.program_id(1) * PER_SPLIT
    end = tl.minimum(begin + PER_SPLIT, STEPS)
    gdc_launch(PDL)
    gdc_wait(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        k0 = step * BLOCK_K
        w = load_weights(w_ptr, first_tile, tiles, k0, CHUNKS, BLOCK_N, BLOCK_K, A8, WIDE, FP16)
        if K % BLOCK_K == 0:
            x = tl.load(x_rows + (k0 + inner)[:, None])
        else:
            x = tl.load(x_rows + (k0 + inner)[:, None], mask=(k0 + inner < K)[:, None], other=0)
        s = load_scales(s_ptr, first_tile, tiles, k0 // GROUP, GROUPS, BLOCK_N, BLOCK_K // GROUP, PER_LOAD)
        if A8:
            part = tl.dot(w, x, out_dtype=tl.int32).to(tl.float32)
            xs = tl.load(xs_ptr + here * (K // GROUP) + step)
            acc += part * (tl.sum(s, 1)[:, None] * xs[None, :])
        elif FOLD:
            scaled = tl.reshape(w, (BLOCK_N, BLOCK_K // GROUP, GROUP)).to(tl.float32) * s[:, :, None]
            w = tl.reshape(scaled, (BLOCK_N, BLOCK_K)).to(w.dtype)
            acc = tl.dot(w, x.to(w.dtype), acc, input_precision="ieee")
        else:
            acc += tl.dot(w, x.to(w.dtype), input_precision="ieee") * tl.sum(s, 1)[:, None]
    if A8:
        acc *= 0.0625
    if SPLIT_K == 1:
        _store_out(acc, bias_ptr, y_ptr, row, token, m, n, HAS_BIAS)
    else:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        store_partial(partial_ptr, tile, tl.program_id(1), acc, BLOCK_N, BLOCK_M, SPLIT_K)
        if is_last_split(ticket_ptr + tile, SPLIT_K):
            total = sum_partials(partial_ptr, tile, BLOCK_N, BLOCK_M, SPLIT_K)
            _store_out(total, bias_ptr, y_ptr, row, token, m, n, HAS_BIAS)


def dot_workspace(shape: LinearShape, config: KernelConfig) -> int:
    """Bytes of workspace this launch needs (0 without SPLIT_K)."""
    tiles = triton.cdiv(shape.n, config["BLOCK_N"]) * triton.cdiv(shape.m, config["BLOCK_M"])
    return split_k_bytes(tiles, config["SPLIT_K"], config["BLOCK_N"] * config["BLOCK_M"])


def launch_int4_dot(x: torch.Tensor, packed: Packed, config: KernelConfig, out: torch.Tensor, *,
                    x_scale: torch.Tensor | None = None, workspace: torch.Tensor | None = None) -> None:
    """out [m, n] by ``int4_dot``. ``config.meta``: BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K, FOLD.

    x is bf16 or fp16 [m, k] (A16), or int8 codes with ``x_scale`` [m, k / group] (A8, BLOCK_K = group).
    """
    a8 = x.dtype == torch.int8
    words, scales = packed.tensors["words"], packed.tensors["scales"]
    m = out.shape[0]
    shape = LinearShape(m, packed.n, packed.k, packed.group)
    views = split_k_views(workspace, dot_workspace(shape, config))
    partials, tickets = (words, words) if views is None else views
    grid = (triton.cdiv(packed.n, config["BLOCK_N"]), config["SPLIT_K"], triton.cdiv(m, config["BLOCK_M"]))
    pieces = words.view(torch.int8) if a8 else words
    bias = packed.tensors.get("bias")
    int4_dot[grid](x, scales if x_scale is None else x_scale, pieces, scales, scales if bias is None else bias, out,
                   partials, tickets, m, packed.n, K=packed.k, GROUP=packed.group, BLOCK_M=config["BLOCK_M"],
                   BLOCK_N=config["BLOCK_N"], BLOCK_K=config["BLOCK_K"], SPLIT_K=config["SPLIT_K"],
                   FOLD=bool(config["FOLD"]), STAGES=config.num_stages, PER_LOAD=scales_per_load(scales.dtype), A8=a8,
                   WIDE=INTERPRETED, HAS_BIAS=bias is not None, **launch_options(config))
