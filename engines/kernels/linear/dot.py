"""Tensor-core product for few tokens, bound by reading the weights: operands swapped.

    out[t, r] = sum_c x[t, c] * weight[r, c]        computed as   out^T [n, m] = weight [n, k] . x^T [k, m]

Hopper's warpgroup instruction multiplies 64 rows at a time. With tokens as rows a decode batch of 8 would fill an
eighth of it, and Triton falls back to the older ``mma``. With *weights* as rows the tile is full whatever the batch is:
``BLOCK_N`` (64, 128) weight rows by ``BLOCK_M`` (16 ... 256) tokens, which compiles to HGMMA, QGMMA or IGMMA.

    program (pn, ps, pm):  weight tile [BLOCK_N, BLOCK_K] -> shared (cp.async, or TMA with a tensor descriptor)
                           x tile      [BLOCK_M, BLOCK_K] -> shared, read transposed
                           accumulator [BLOCK_N, BLOCK_M] fp32 (int32 for int8), scaled once, stored transposed

``TMA`` 0: pointers; 1: weights by TMA; 2: weights and x. TMA fills with zeros beyond the ends. ``SPLIT_K`` programs
share a tile's k range (see split_k). A row's sum depends on BLOCK_K and SPLIT_K only, so with both held fixed per
weight a token's result does not depend on its batch mates. ``PREFETCH`` asks for that many bytes of each weight row to
be brought into L2 before ``gdc_wait``, so that the memory does not idle across the kernel boundary. Scales and bias
are asked for before the loop: at its end their way from memory would be all that a program waits for.

``KIND`` as in gemv; ``int8_weight`` and ``fp8_weight`` widen the codes to x's type in registers, straight into the
instruction. ``fp8_block``: both sides are e4m3 and have a scale for every BLOCK_K inputs, so each step's sum leaves the
tensor core, is scaled in registers (weight_scale [k / BLOCK_K, n], x_scale [m, k / BLOCK_K]) and added in fp32, which
also keeps the short fp8 accumulator from ever holding more than BLOCK_K products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engines.kernels.impl import KernelConfig, LinearShape
from engines.kernels.jit import arrives_last, gdc_launch, gdc_wait, launch_options, settled
from engines.kernels.linear.split_k import (
    split_k_bytes,
    split_k_views,
    store_partial,
    sum_partials,
)


@triton.jit
def prefetch_l2(pointers, BYTES: tl.constexpr) -> None:
    """Ask for BYTES (a multiple of 16) from each 16-byte aligned pointer to be brought into L2. Hopper and later."""
    tl.inline_asm_elementwise("cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,n",
                              [pointers.to(tl.int64), BYTES], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store_tokens(acc, w_scale, x_scale, bias, out_ptr, row, token, m, n, KIND: tl.constexpr,
                 HAS_BIAS: tl.constexpr) -> None:
    """Scale an accumulator [rows, tokens] fp32, add the bias, and store it transposed into out [m, n]."""
    if KIND != "float" and KIND != "fp8_block":
        acc *= w_scale[:, None]
    if KIND == "int8" or KIND == "fp8":
        acc *= x_scale[None, :]
    if HAS_BIAS:
        acc += bias[:, None]
    at = out_ptr + token.to(tl.int64)[None, :] * n + row[:, None]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(row < n)[:, None] & (token < m)[None, :])


@triton.jit(do_not_specialize=["m"], do_not_specialize_on_alignment=["x_scale_ptr"])
def dot_kernel(x_ptr, x_desc, w_ptr, w_desc, w_scale_ptr, x_scale_ptr, bias_ptr, out_ptr, partial_ptr, ticket_ptr,
               m, n, k, KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
               SPLIT_K: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, PREFETCH: tl.constexpr,
               EVEN_K: tl.constexpr, PER_TOKEN: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr) -> None:
    first_row = tl.program_id(0) * BLOCK_N
    first_token = tl.program_id(2) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_N)
    token = first_token + tl.arange(0, BLOCK_M)
    unit = tl.arange(0, BLOCK_K)
    steps = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLIT_K)
    begin = tl.program_id(1) * steps
    end = tl.minimum(begin + steps, tl.cdiv(k, BLOCK_K))
    valid = tl.minimum(row, n - 1)
    w_rows = w_ptr + valid.to(tl.int64)[:, None] * k
    x_rows = x_ptr + token.to(tl.int64)[None, :] * k
    present = (token < m)[None, :]  # an absent token costs no load; repeating the last one makes it a hot spot in L2
    gdc_launch(PDL)
    if PREFETCH > 0:
        prefetch_l2(w_ptr + valid.to(tl.int64) * k + begin * BLOCK_K, PREFETCH)
    w_scale, x_scale, bias = 1.0, 1.0, 0.0
    if KIND != "float" and KIND != "fp8_block":
        w_scale = tl.load(w_scale_ptr + valid)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + valid).to(tl.float32)
    gdc_wait(PDL)
    if KIND == "int8" or KIND == "fp8":
        x_scale = tl.load(x_scale_ptr + tl.minimum(token, m - 1) * PER_TOKEN)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if KIND == "int8" else tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        at = step * BLOCK_K
        if TMA > 0:
            w = w_desc.load([first_row, at])
        elif EVEN_K:
            w = tl.load(w_rows + (at + unit)[None, :])
        else:
            w = tl.load(w_rows + (at + unit)[None, :], mask=(at + unit < k)[None, :], other=0.0)
        if TMA == 2:
            x = x_desc.load([first_token, at]).T
        elif EVEN_K:
            x = tl.load(x_rows + (at + unit)[:, None], mask=present, other=0.0)
        else:
            x = tl.load(x_rows + (at + unit)[:, None], mask=present & (at + unit < k)[:, None], other=0.0)
        if KIND == "int8_weight" or KIND == "fp8_weight":
            w = w.to(x.dtype)
        if KIND == "fp8_block":
            by_row = tl.load(w_scale_ptr + step * n + valid)
            by_token = tl.load(x_scale_ptr + tl.minimum(token, m - 1) * (k // BLOCK_K) + step)
            acc += tl.dot(w, x, out_dtype=tl.float32) * by_row[:, None] * by_token[None, :]
        else:
            acc = tl.dot(w, x, acc, out_dtype=acc.dtype)
        if KIND == "int8_weight" or KIND == "fp8_weight":
            acc = settled(acc)
    result = acc.to(tl.float32)
    if SPLIT_K == 1:
        store_tokens(result, w_scale, x_scale, bias, out_ptr, row, token, m, n, KIND, HAS_BIAS)
    else:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        store_partial(partial_ptr, tile, tl.program_id(1), result, BLOCK_N, BLOCK_M, SPLIT_K)
        if arrives_last(ticket_ptr + tile, SPLIT_K):
            result = sum_partials(partial_ptr, tile, BLOCK_N, BLOCK_M, SPLIT_K)
            store_tokens(result, w_scale, x_scale, bias, out_ptr, row, token, m, n, KIND, HAS_BIAS)


def dot_tiles(shape: LinearShape, config: KernelConfig) -> tuple[int, int]:
    """(tiles along n, tiles along m)."""
    return triton.cdiv(shape.n, config["BLOCK_N"]), triton.cdiv(shape.m, config["BLOCK_M"])


def dot_workspace(shape: LinearShape, config: KernelConfig) -> int:
    """Bytes of workspace this launch needs."""
    rows, tokens = dot_tiles(shape, config)
    return split_k_bytes(rows * tokens, config["SPLIT_K"], config["BLOCK_N"] * config["BLOCK_M"])


def launch_dot(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: KernelConfig, kind: str, *,
               w_scale: torch.Tensor | None, x_scale: torch.Tensor | None, bias: torch.Tensor | None,
               workspace: torch.Tensor | None) -> None:
    """out [m, n] = x [m, k] weight [n, k]^T for any m >= 1; tensors contiguous, addresses multiples of 16.

    ``config.meta``: BLOCK_M, BLOCK_N, BLOCK_K (elements), SPLIT_K, TMA, PREFETCH. TMA needs rows of 16 n bytes.
    """
    m, n, k = out.shape[0], out.shape[1], weight.shape[1]
    shape = LinearShape(m, n, k)
    views = split_k_views(workspace, dot_workspace(shape, config))
    some = weight
    partials, tickets = (some, some) if views is None else views
    tile_n, tile_m, tile_k = config["BLOCK_N"], config["BLOCK_M"], config["BLOCK_K"]
    rows, tokens = dot_tiles(shape, config)
    dot_kernel[(rows, config["SPLIT_K"], tokens)](
        x, TensorDescriptor.from_tensor(x, [tile_m, tile_k]) if config["TMA"] == 2 else None,
        weight, TensorDescriptor.from_tensor(weight, [tile_n, tile_k]) if config["TMA"] else None,
        some if w_scale is None else w_scale, some if x_scale is None else x_scale, some if bias is None else bias,
        out, partials, tickets, m, n, k, KIND=kind, BLOCK_M=tile_m, BLOCK_N=tile_n, BLOCK_K=tile_k,
        SPLIT_K=config["SPLIT_K"], STAGES=config.num_stages, TMA=config["TMA"], PREFETCH=config["PREFETCH"],
        EVEN_K=k % tile_k == 0, PER_TOKEN=x_scale is not None and x_scale.ndim > 0, HAS_BIAS=bias is not None,
        **launch_options(config))
