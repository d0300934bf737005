"""4-bit linears for a batch of tokens (9 ... 512), and for any number where there is no inline assembly.

    out[t, row] = sum over groups g of  scale[row, g] * sum over k in g of  q[row, k] * x[t, k]

A program owns ``BLOCK_N`` rows (weights stand on the matrix instruction's 64-wide side) and ``BLOCK_M`` tokens. Each
step takes one group of inputs, or ``BLOCK_K`` of them when FOLD is set:

    words   [tiles, chunks, lanes]  the storage of ``int4_layout``, loaded as it lies
    weights [BLOCK_N, BLOCK_K]      widened by shifts and masks (1 or 2 instructions each), put in place by permuting
                                    axes; the order of storage is that of the instruction's register operand, so
                                    this costs no traffic
    x       [BLOCK_K, BLOCK_M]      through shared memory, pipelined
    sum     [BLOCK_N, BLOCK_M]      fp32; the group's part is scaled in fp32 and added

FOLD (16-bit x only) multiplies the scale into the weight first, rounded to x's type: one accumulator instead of two and
no wait at the end of each group, at the price of that rounding (2^-9 relative for bf16, as dequantizing to bf16 has).
FLIP reads words of order A8 as 16-bit numbers, for activations in the order that ``int4_dot16`` makes.
``SPLIT_K`` as in ``split_k``. All arithmetic is plain Triton, so the interpreter runs it; there weights and activations
are fp32 in the dot (bf16 is wrong there).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engines.kernels.impl import KernelConfig, LinearShape, Packed
from engines.kernels.jit import INTERPRETED, arrives_last, gdc_launch, gdc_wait, launch_options, settled
from engines.kernels.linear.int4_layout import Order, scales_per_load
from engines.kernels.linear.split_k import (
    split_k_bytes,
    split_k_views,
    store_partial,
    sum_partials,
)

__all__ = ["dot_workspace", "launch_int4_dot", "load_scales", "load_weights"]


@triton.jit
def load_weights(w_ptr, first_tile, tiles, k0, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                 A8: tl.constexpr, FLIP: tl.constexpr, WIDE: tl.constexpr, FP16: tl.constexpr) -> tl.tensor:
    """Codes of BLOCK_N rows x BLOCK_K inputs from k0: bf16, fp16 (FP16), fp32 (WIDE) or, for A8, int8 16 q.

    BLOCK_K is 32 or a multiple of 64. FLIP: the words are of order A8, and the inputs come out in the order of
    ``int4_dot16``.

    Two weights at a time (A8: four), as they lie in a word, and tiles next to lanes: warps are dealt tiles, as the
    matrix instruction deals rows to warps. What comes out *is* its register operand: nothing widened passes through
    shared memory.
    """
    TILES: tl.constexpr = BLOCK_N // 16
    HALVES: tl.constexpr = 1 if BLOCK_K == 32 else 2
    STEP: tl.constexpr = BLOCK_K // 32 // HALVES
    if A8:
        tile = tl.minimum(first_tile + tl.arange(0, TILES), tiles - 1)[:, None, None, None]
        chunk = (k0 // 64 + tl.arange(0, STEP))[None, :, None, None]
    else:
        tile = tl.minimum(first_tile + tl.arange(0, TILES), tiles - 1)[None, :, None, None]
        chunk = (k0 // 64 + tl.arange(0, STEP))[:, None, None, None]
    lane = tl.arange(0, 32)[None, None, :, None]
    inner = chunk * 128 + lane * 4 + tl.arange(0, 2 * HALVES)[None, None, None, :]
    if HALVES == 1:
        inner += k0 % 64 // 32 * 2
    w = tl.load(w_ptr + tile * (CHUNKS * 128) + inner)
    if A8:
        HIGH: tl.constexpr = -0x0F0F0F10  # 0xf0f0f0f0
        both = tl.join((w << 4) & HIGH, w & HIGH)  # ... h
        even = tl.join(both.to(tl.int8), (both >> 16).to(tl.int8))
        odd = tl.join((both >> 8).to(tl.int8), (both >> 24).to(tl.int8))
        values = tl.reshape(tl.join(even, odd), (TILES, STEP, 8, 4, HALVES, 2, 2, 4))  # tile chunk r c i2 i1 h e
        values = tl.reshape(tl.permute(values, (0, 6, 2, 1, 4, 3, 5, 7)), (BLOCK_N, BLOCK_K))
    else:
        low = tl.join(w & 0x000F000F, (w >> 4) & 0x000F000F)
        high = tl.join((w >> 8) & 0x000F000F, (w >> 12) & 0x000F000F)
        BASE: tl.constexpr = 0 if WIDE else 0x64006400 if FP16 else 0x43004300
        SIGNS: tl.constexpr = 0x00080008 if FLIP else 0  # two's complement to q + 8
        pairs = tl.join(low, high) ^ (BASE + SIGNS)  # ... h, e1
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
def load_token_scales(pointers, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr) -> tl.tensor:
    """A scale for each token (pointers [BLOCK_M]), fp32 [BLOCK_N, BLOCK_M] with equal rows.

    Asked for as it is, each thread would copy every scale of its columns, up to 32 four-byte copies a step. 256 copies
    in all are one a thread (and enough for the compiler not to go back to many): all rows read theirs from there.
    """
    COPIES: tl.constexpr = 256 // BLOCK_M
    scale = tl.load(tl.broadcast_to(pointers[None, :], (COPIES, BLOCK_M)))
    return tl.reshape(tl.broadcast_to(scale[None, :, :], (BLOCK_N // COPIES, COPIES, BLOCK_M)), (BLOCK_N, BLOCK_M))


@triton.jit
def _store_out(acc, bias_ptr, y_ptr, row, token, m, n, HAS_BIAS: tl.constexpr) -> None:
    """acc [rows, tokens] (+ bias [n]) -> y [m, n]."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    at = y_ptr + token.to(tl.int64)[None, :] * n + row[:, None]
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=(row < n)[:, None] & (token < m)[None, :])


@triton.jit(do_not_specialize=["m"])
def int4_dot(x_ptr, xs_ptr, w_ptr, s_ptr, bias_ptr, y_ptr, partial_ptr, ticket_ptr, m, n, K: tl.constexpr,
             GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
             SPLIT_K: tl.constexpr, FOLD: tl.constexpr, STAGES: tl.constexpr, PER_LOAD: tl.constexpr, A8: tl.constexpr,
             FLIP: tl.constexpr, X_SCALES: tl.constexpr, WIDE: tl.constexpr, HAS_BIAS: tl.constexpr,
             PDL: tl.constexpr):
    """Grid (tiles of rows, SPLIT_K, tiles of tokens).

    A8: ``xs`` [m, K / GROUP]. X_SCALES: ``xs`` [K / GROUP, tokens of all tiles], multiplied onto each group's sum.
    """
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
        w = load_weights(w_ptr, first_tile, tiles, k0, CHUNKS, BLOCK_N, BLOCK_K, A8, FLIP, WIDE, FP16)
        if K % BLOCK_K == 0:
            x = tl.load(x_rows + (k0 + inner)[:, None])
        else:
            x = tl.load(x_rows + (k0 + inner)[:, None], mask=(k0 + inner < K)[:, None], other=0)
        s = load_scales(s_ptr, first_tile, tiles, k0 // GROUP, GROUPS, BLOCK_N, BLOCK_K // GROUP, PER_LOAD)
        if A8:
            part = tl.dot(w, x, out_dtype=tl.int32).to(tl.float32)
            xs = load_token_scales(xs_ptr + here * (K // GROUP) + step, BLOCK_N, BLOCK_M)
            acc += part * (tl.sum(s, 1)[:, None] * xs)
        elif FOLD:
            scaled = tl.reshape(w, (BLOCK_N, BLOCK_K // GROUP, GROUP)).to(tl.float32) * s[:, :, None]
            w = tl.reshape(scaled, (BLOCK_N, BLOCK_K)).to(w.dtype)
            acc = settled(tl.dot(w, x.to(w.dtype), acc, input_precision="ieee"))
        elif X_SCALES:  # absent tokens have a place, whatever it holds: what comes of it is not stored
            xs = load_token_scales(xs_ptr + step * (tl.num_programs(2) * BLOCK_M) + token, BLOCK_N, BLOCK_M)
            acc += tl.dot(w, x.to(w.dtype), input_precision="ieee") * (tl.sum(s, 1)[:, None] * xs)
        else:
            acc += tl.dot(w, x.to(w.dtype), input_precision="ieee") * tl.sum(s, 1)[:, None]
    if A8:
        acc *= 0.0625
    if SPLIT_K == 1:
        _store_out(acc, bias_ptr, y_ptr, row, token, m, n, HAS_BIAS)
    else:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        store_partial(partial_ptr, tile, tl.program_id(1), acc, BLOCK_N, BLOCK_M, SPLIT_K)
        if arrives_last(ticket_ptr + tile, SPLIT_K):
            total = sum_partials(partial_ptr, tile, BLOCK_N, BLOCK_M, SPLIT_K)
            _store_out(total, bias_ptr, y_ptr, row, token, m, n, HAS_BIAS)


def dot_workspace(shape: LinearShape, config: KernelConfig) -> int:
    """Bytes of workspace this launch needs (0 without SPLIT_K)."""
    tiles = triton.cdiv(shape.n, config["BLOCK_N"]) * triton.cdiv(shape.m, config["BLOCK_M"])
    return split_k_bytes(tiles, config["SPLIT_K"], config["BLOCK_N"] * config["BLOCK_M"])


def launch_int4_dot(x: torch.Tensor, packed: Packed, config: KernelConfig, out: torch.Tensor, *, order: Order,
                    x_scale: torch.Tensor | None = None, workspace: torch.Tensor | None = None) -> None:
    """out [m, n] by ``int4_dot``. ``config.meta``: BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K, FOLD.

    Words of order A16: x bf16 or fp16 [m, k]. Order A8: x int8 codes with ``x_scale`` [m, k / group] and BLOCK_K the
    group, or both as ``int4_dot16`` makes them.
    """
    a8 = x.dtype == torch.int8
    flip = order is Order.A8 and not a8
    words, scales = packed.tensors["words"], packed.tensors["scales"]
    m = out.shape[0]
    shape = LinearShape(m, packed.n, packed.k, packed.group)
    views = split_k_views(workspace, dot_workspace(shape, config))
    partials, tickets = (words, words) if views is None else views
    grid = (triton.cdiv(packed.n, config["BLOCK_N"]), config["SPLIT_K"], triton.cdiv(m, config["BLOCK_M"]))
    bias = packed.tensors.get("bias")
    int4_dot[grid](x, scales if x_scale is None else x_scale, words, scales, scales if bias is None else bias, out,
                   partials, tickets, m, packed.n, K=packed.k, GROUP=packed.group, BLOCK_M=config["BLOCK_M"],
                   BLOCK_N=config["BLOCK_N"], BLOCK_K=config["BLOCK_K"], SPLIT_K=config["SPLIT_K"],
                   FOLD=config["FOLD"] == 1, STAGES=config.num_stages, PER_LOAD=scales_per_load(scales.dtype), A8=a8,
                   FLIP=flip, X_SCALES=flip and config["FOLD"] == 0, WIDE=INTERPRETED, HAS_BIAS=bias is not None,
                   **launch_options(config))
