"""W8A16: 8-bit weights (int8 or e4m3 codes) with one scale a row, 16-bit activations.

    out[t, r] = weight_scale[r] * sum_c x[t, c] weight[r, c]     x bf16 (fp16 too, in the dot body)

Half the bytes of bf16 and no activation error, at the price of widening every weight:

* GEMV (int8, one token, bf16 x): bytes become floats through the mantissa trick (see gemv), fp32 sum.
* swapped dot: codes are widened in registers, which feed the matrix instruction directly; exact: an int8 has 8
  significant bits and an e4m3 code 4, bf16 holds 8 and all of e4m3's exponents.
* prefill: one pass writes ``code * scale`` in x's type to the workspace (3 bytes of traffic a weight, about 1 % of the
  product's time at 16,384 tokens), then torch.mm. The weight is rounded to 16 bits once, as a dequantized
  checkpoint's would be.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import triton
import triton.language as tl

from engines.kernels.impl import DeviceFacts, KernelConfig, LinearShape, Packed
from engines.kernels.jit import INTERPRETED, next_pow2
from engines.kernels.linear.candidates import DotTiles, GemvTile
from engines.kernels.linear.fp8 import needs_e4m3
from engines.kernels.linear.natural import MANY_TOKENS, NaturalLinear
from engines.kernels.linear.split_k import scratch_bytes, scratch_view

_GEMV: dict[int, list[GemvTile]] = {
    1: [(4, 512, 0, 4), (2, 512, 0, 4), (4, 512, 1, 4), (8, 512, 1, 4)],  # (8 rows held ahead: 176 registers)
    2: [(4, 512, 0, 4), (2, 512, 0, 4)],
    4: [(2, 512, 0, 4), (1, 512, 0, 4)],
}
_DOT = {
    16: DotTiles([(64, 128, 4, 4, 4), (64, 256, 2, 3, 4), (64, 128, 2, 4, 4), (64, 256, 1, 3, 4)],
                 [(64, 256, 1, 3, 4), (64, 128, 1, 4, 4), (128, 128, 2, 4, 8)]),
    64: DotTiles([(64, 128, 4, 4, 4), (64, 256, 2, 3, 4), (64, 128, 2, 4, 4), (64, 256, 1, 3, 4)],
                 [(128, 128, 1, 4, 8), (64, 128, 1, 4, 4)]),
    256: DotTiles([(64, 64, 2, 5, 4), (64, 128, 1, 3, 4), (64, 64, 1, 5, 4), (128, 64, 2, 4, 8)],
                  [(128, 64, 1, 4, 8), (64, 128, 1, 3, 4)]),
}


@triton.jit
def dequantize_kernel(w_ptr, scale_ptr, out_ptr, k, BLOCK: tl.constexpr) -> None:
    """One program: BLOCK codes of one row, times the row's scale, in out's type."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    base = row.to(tl.int64) * k
    w = tl.load(w_ptr + base + at, mask=at < k, other=0.0).to(tl.float32)
    tl.store(out_ptr + base + at, (w * tl.load(scale_ptr + row)).to(out_ptr.dtype.element_ty), mask=at < k)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """out [n, k] 16-bit = codes [n, k] (int8 or e4m3) * scale [n] f32, rounded once: 3 bytes of traffic a weight."""
    if not codes.is_cuda and not INTERPRETED:
        out.copy_(codes.float() * scale[:, None])
        return
    n, k = codes.shape
    block = min(4096, next_pow2(k))
    dequantize_kernel[(n, triton.cdiv(k, block))](codes, scale, out, k, BLOCK=block, num_warps=4)


class WeightOnlyLinear(NaturalLinear):
    """8-bit weights times 16-bit activations."""

    x_dtypes = (torch.bfloat16, torch.float16)
    quantized_x = False
    dot_tiles = _DOT

    def torch_runs(self, shape: LinearShape, device: DeviceFacts) -> bool:
        return shape.m > MANY_TOKENS

    def workspace_bytes(self, shape: LinearShape, config: KernelConfig) -> int:
        if config.kernel == "torch":
            return scratch_bytes(2 * shape.n * shape.k)
        return super().workspace_bytes(shape, config)

    def launch_torch(self, x: torch.Tensor, packed: Packed, out: torch.Tensor, x_scale: torch.Tensor | None,
                     workspace: torch.Tensor | None) -> None:
        codes, scale = packed.tensors["weight"], packed.tensors["weight_scale"]
        weight = scratch_view(workspace, 2 * codes.numel()).view(x.dtype).view(codes.shape)
        dequantize(codes, scale, weight)
        bias = packed.tensors.get("bias")
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)


class Int8WeightOnlyLinear(WeightOnlyLinear):
    """int8 weights."""

    name = "int8_weight_only"
    kind = "int8_weight"
    weight_dtypes = (torch.int8,)
    gemv_tiles = _GEMV


class Fp8WeightOnlyLinear(WeightOnlyLinear):
    """e4m3 weights; the dot body from one token on."""

    name = "fp8_weight_only"
    kind = "fp8_weight"
    weight_dtypes = (torch.float8_e4m3fn,)
    gemv_tiles: ClassVar[dict[int, list[GemvTile]]] = {}

    def supports(self, shape: LinearShape, device: DeviceFacts) -> str | None:
        return needs_e4m3(device) or super().supports(shape, device)
