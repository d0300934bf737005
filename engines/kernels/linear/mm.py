"""Tensor-core product for many tokens (prefill), bound by arithmetic: persistent, fed by TMA. Hopper and later.

    out [m, n] = x [m, k] . weight [n, k]^T

A program stays on its multiprocessor and takes output tiles ``program, program + programs, ...``, so that the first
loads of the next tile overlap the last stores of this one, and there is no half-empty last wave of launches. Tiles are
walked ``GROUP_M`` tile rows at a time: programs that run together then share rows of x and of the weight in L2.

    x tile [BLOCK_M, BLOCK_K], weight tile [BLOCK_N, BLOCK_K] -> shared by TMA, ``num_stages`` deep
    accumulator [BLOCK_M, BLOCK_N] fp32 (int32 for int8) in registers -> scaled once per tile -> bf16 -> TMA store

Scales stand outside the sum (channel x token), so the main loop holds nothing but loads and matrix instructions. The
tile is stored in ``EPILOGUE`` column slices, which halves the shared memory it needs and leaves it to the pipeline.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engines.kernels.impl import KernelConfig
from engines.kernels.jit import gdc_launch, gdc_wait, launch_options


@triton.jit
def _store_slice(acc, first_token, first_row, w_scale_ptr, x_scale_ptr, bias_ptr, out_desc, m, n, KIND: tl.constexpr,
                 BLOCK_M: tl.constexpr, COLS: tl.constexpr, PER_TOKEN: tl.constexpr, HAS_BIAS: tl.constexpr) -> None:
    """Scale columns ``first_row ...`` of a tile and store them; TMA drops what lies beyond the ends."""
    row = tl.minimum(first_row + tl.arange(0, COLS), n - 1)
    token = tl.minimum(first_token + tl.arange(0, BLOCK_M), m - 1)
    y = acc.to(tl.float32)
    if KIND == "int8" or KIND == "fp8":
        y *= tl.load(x_scale_ptr + token * PER_TOKEN)[:, None] * tl.load(w_scale_ptr + row)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    out_desc.store([first_token, first_row], y.to(out_desc.dtype))


@triton.jit(do_not_specialize=["m"], do_not_specialize_on_alignment=["x_scale_ptr"])
def mm_kernel(x_desc, w_desc, out_desc, w_scale_ptr, x_scale_ptr, bias_ptr, m, n, k, KIND: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
              EPILOGUE: tl.constexpr, PER_TOKEN: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr) -> None:
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    COLS: tl.constexpr = BLOCK_N // EPILOGUE
    gdc_launch(PDL)
    gdc_wait(PDL)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        group = tile // (GROUP_M * tiles_n)
        height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        inside = tile % (GROUP_M * tiles_n)
        first_token = (group * GROUP_M + inside % height) * BLOCK_M
        first_row = inside // height * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if KIND == "int8" else tl.float32)
        for step in range(tl.cdiv(k, BLOCK_K)):
            x = x_desc.load([first_token, step * BLOCK_K])
            w = w_desc.load([first_row, step * BLOCK_K])
            acc = tl.dot(x, w.T, acc, out_dtype=acc.dtype)
        if EPILOGUE == 1:
            _store_slice(acc, first_token, first_row, w_scale_ptr, x_scale_ptr, bias_ptr, out_desc, m, n, KIND,
                         BLOCK_M, COLS, PER_TOKEN, HAS_BIAS)
        else:
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, COLS)), (0, 2, 1)))
            _store_slice(left, first_token, first_row, w_scale_ptr, x_scale_ptr, bias_ptr, out_desc, m, n, KIND,
                         BLOCK_M, COLS, PER_TOKEN, HAS_BIAS)
            _store_slice(right, first_token, first_row + COLS, w_scale_ptr, x_scale_ptr, bias_ptr, out_desc, m, n,
                         KIND, BLOCK_M, COLS, PER_TOKEN, HAS_BIAS)


def launch_mm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: KernelConfig, kind: str, *,
              w_scale: torch.Tensor | None, x_scale: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    """out [m, n] = x [m, k] weight [n, k]^T; contiguous, rows of 16 n bytes (TMA), k and n as supports() allowed.

    ``config.meta``: BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EPILOGUE (1 or 2), PROGRAMS (as many as multiprocessors).
    """
    m, n, k = out.shape[0], out.shape[1], weight.shape[1]
    tile_m, tile_n, tile_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    tiles = triton.cdiv(m, tile_m) * triton.cdiv(n, tile_n)
    some = weight
    mm_kernel[(min(tiles, config["PROGRAMS"]),)](
        TensorDescriptor.from_tensor(x, [tile_m, tile_k]), TensorDescriptor.from_tensor(weight, [tile_n, tile_k]),
        TensorDescriptor.from_tensor(out, [tile_m, tile_n // config["EPILOGUE"]]),
        some if w_scale is None else w_scale, some if x_scale is None else x_scale, some if bias is None else bias,
        m, n, k, KIND=kind, BLOCK_M=tile_m, BLOCK_N=tile_n, BLOCK_K=tile_k, GROUP_M=config["GROUP_M"],
        EPILOGUE=config["EPILOGUE"], PER_TOKEN=x_scale is not None and x_scale.ndim > 0, HAS_BIAS=bias is not None,
        **launch_options(config))
