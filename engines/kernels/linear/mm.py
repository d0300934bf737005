"""Tensor-core product for many tokens (prefill), bound by arithmetic: persistent, fed by TMA. Hopper and later.

    out [m, n] = x [m, k] . weight [n, k]^T

A program stays on its multiprocessor and takes output tiles ``program, program + programs, ...``: there is no
half-empty last wave of launches. Tiles are walked ``GROUP_M`` tile rows at a time: programs that run together share
rows of x and of the weight in L2. With ``FLAT`` the compiler makes one loop of those over tiles and over k: the next
tile's first bulk copies are asked for before this one is scaled and stored, where otherwise each tile begins with empty
buffers.

    x tile [BLOCK_M, BLOCK_K], weight tile [BLOCK_N, BLOCK_K] -> shared by TMA, ``num_stages`` deep
    accumulator [BLOCK_M, BLOCK_N] fp32 (int32 for int8) in registers -> scaled once per tile -> bf16 -> TMA store

Scales stand outside the sum (channel x token), so the main loop holds nothing but loads and matrix instructions. The
tile is stored in ``EPILOGUE`` column slices, which halves the shared memory it needs and leaves it to the pipeline.

``GATED``: the weight is a stacked gate and up, [2, inter, k]. One bulk copy fetches the same BLOCK_N / 2 rows of both,
so the loop is the same; a thread of the accumulator holds both values of a column, and silu(gate) * up [m, inter] is
what is stored, bf16 or fp8 by a static scale. A layer's widest rows are neither written nor read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engines.kernels.impl import KernelConfig
from engines.kernels.jit import gdc_launch, gdc_wait, launch_options, silu, to_fp8


@triton.jit
def _scaled(acc, first_token, row, w_scale_ptr, x_scale_ptr, bias_ptr, m, n, KIND: tl.constexpr,
            BLOCK_M: tl.constexpr, PER_TOKEN: tl.constexpr, HAS_BIAS: tl.constexpr) -> tl.tensor:
    """A tile of weight rows ``row`` with their scales and bias, fp32; beyond the ends stands the last one's."""
    row = tl.minimum(row, n - 1)
    token = tl.minimum(first_token + tl.arange(0, BLOCK_M), m - 1)
    y = acc.to(tl.float32)
    if KIND == "int8" or KIND == "fp8":
        y *= tl.load(x_scale_ptr + token * PER_TOKEN)[:, None] * tl.load(w_scale_ptr + row)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    return y


@triton.jit(do_not_specialize=["m"], do_not_specialize_on_alignment=["x_scale_ptr", "out_scale_ptr"])
def mm_kernel(x_desc, w_desc, out_desc, w_scale_ptr, x_scale_ptr, bias_ptr, out_scale_ptr, m, n, k,
              KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
              GROUP_M: tl.constexpr, EPILOGUE: tl.constexpr, PER_TOKEN: tl.constexpr, HAS_BIAS: tl.constexpr,
              GATED: tl.constexpr, FLAT: tl.constexpr, PDL: tl.constexpr) -> None:
    """Stores let TMA drop what lies beyond the ends."""
    COLS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N // EPILOGUE
    STEP: tl.constexpr = COLS if GATED else BLOCK_N
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n // 2 if GATED else n, STEP)
    tl.assume(k > 0)
    gdc_launch(PDL)
    gdc_wait(PDL)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLAT):
        group = tile // (GROUP_M * tiles_n)
        height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        inside = tile % (GROUP_M * tiles_n)
        first_token = (group * GROUP_M + inside % height) * BLOCK_M
        first_row = inside // height * STEP
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if KIND == "int8" else tl.float32)
        for step in range(tl.cdiv(k, BLOCK_K)):
            x = x_desc.load([first_token, step * BLOCK_K])
            if GATED:
                w = tl.reshape(w_desc.load([0, first_row, step * BLOCK_K]), (BLOCK_N, BLOCK_K))
            else:
                w = w_desc.load([first_row, step * BLOCK_K])
            acc = tl.dot(x, w.T, acc, out_dtype=acc.dtype)
        if GATED:
            local = tl.arange(0, BLOCK_N)
            row = first_row + local % COLS + local // COLS * (n // 2)
            y = _scaled(acc, first_token, row, w_scale_ptr, x_scale_ptr, bias_ptr, m, n, KIND, BLOCK_M, PER_TOKEN,
                        HAS_BIAS)
            gate, up = tl.split(tl.permute(tl.reshape(y, (BLOCK_M, 2, COLS)), (0, 2, 1)))
            y = silu(gate) * up
            if out_desc.dtype == tl.float8e4nv:
                y = to_fp8(y * (1.0 / tl.load(out_scale_ptr)))
            out_desc.store([first_token, first_row], y.to(out_desc.dtype))
        elif EPILOGUE == 1:
            row = first_row + tl.arange(0, COLS)
            y = _scaled(acc, first_token, row, w_scale_ptr, x_scale_ptr, bias_ptr, m, n, KIND, BLOCK_M, PER_TOKEN,
                        HAS_BIAS)
            out_desc.store([first_token, first_row], y.to(out_desc.dtype))
        else:
            row = first_row + tl.arange(0, COLS)
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, COLS)), (0, 2, 1)))
            y = _scaled(left, first_token, row, w_scale_ptr, x_scale_ptr, bias_ptr, m, n, KIND, BLOCK_M, PER_TOKEN,
                        HAS_BIAS)
            out_desc.store([first_token, first_row], y.to(out_desc.dtype))
            y = _scaled(right, first_token, row + COLS, w_scale_ptr, x_scale_ptr, bias_ptr, m, n, KIND, BLOCK_M,
                        PER_TOKEN, HAS_BIAS)
            out_desc.store([first_token, first_row + COLS], y.to(out_desc.dtype))


def launch_mm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: KernelConfig, kind: str, *,
              w_scale: torch.Tensor | None, x_scale: torch.Tensor | None, bias: torch.Tensor | None,
              gated: bool = False, out_scale: torch.Tensor | None = None) -> None:
    """out [m, n] = x [m, k] weight [n, k]^T; contiguous, rows of 16 n bytes (TMA), k and n as supports() allowed.

    ``config.meta``: BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EPILOGUE (1 or 2), PROGRAMS (as many as multiprocessors), FLAT.
    ``gated``: out is [m, n / 2], silu of the first half of the weight's rows times the second; fp8 with ``out_scale``
    []. Needs an n that is a multiple of 32. Raises ValueError otherwise.
    """
    m, n, k = out.shape[0], weight.shape[0], weight.shape[1]
    tile_m, tile_n, tile_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    if gated and (n % 32 or (out_scale is not None) != (out.dtype == torch.float8_e4m3fn)):
        raise ValueError(f"gated: n {n} must be a multiple of 32, and out_scale goes with fp8, out is {out.dtype}")
    columns = tile_n // 2 if gated else tile_n // config["EPILOGUE"]
    rows = (TensorDescriptor.from_tensor(weight.view(2, n // 2, k), [2, columns, tile_k]) if gated else
            TensorDescriptor.from_tensor(weight, [tile_n, tile_k]))
    tiles = triton.cdiv(m, tile_m) * triton.cdiv(out.shape[1], columns if gated else tile_n)
    some = weight
    mm_kernel[(min(tiles, config["PROGRAMS"]),)](
        TensorDescriptor.from_tensor(x, [tile_m, tile_k]), rows, TensorDescriptor.from_tensor(out, [tile_m, columns]),
        some if w_scale is None else w_scale, some if x_scale is None else x_scale, some if bias is None else bias,
        some if out_scale is None else out_scale, m, n, k, KIND=kind, BLOCK_M=tile_m, BLOCK_N=tile_n, BLOCK_K=tile_k,
        GROUP_M=config["GROUP_M"], EPILOGUE=config["EPILOGUE"], PER_TOKEN=x_scale is not None and x_scale.ndim > 0,
        HAS_BIAS=bias is not None, GATED=gated, FLAT=bool(config.get("FLAT")), **launch_options(config))
