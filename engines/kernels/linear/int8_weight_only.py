"""W8A16: int8 weights with channel scales, 16-bit activations.

    out[t, r] = weight_scale[r] * sum_c x[t, c] weight[r, c]     codes int8, x bf16 (fp16 too, in the dot body)

Half the bytes of bf16 and no activation error, at the price of widening every weight:

* GEMV (one token, bf16 x): bytes become floats through the mantissa trick (see gemv), fp32 sum.
* swapped dot: codes are widened in registers, which feed the matrix instruction directly; exact, |code| <= 128 has 8
  bits and bf16 holds 8.
* prefill: one pass writes ``code * scale`` in x's type to the workspace (3 bytes of traffic a weight, about 1 % of the
  product's time at 16,384 tokens), then torch.mm. The weight is rounded to 16 bits once, as a dequantized
  checkpoint's would be.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engines.kernels.impl import DeviceFacts, KernelConfig, LinearShape, Packed
from engines.kernels.jit import INTERPRETED, next_pow2
from engines.kernels.linear.candidates import DotTiles, GemvTile
from engines.kernels.linear.natural import MANY_TOKENS, NaturalLinear
from engines.kernels.linear.split_k import scratch_bytes, scratch_view

_GEMV: dict[int, list[GemvTile]] = {
    1: [(8, 512, 0, 4), (4, 512, 0, 4), (4, 512, 1, 4), (2, 512, 0, 4), (8, 512, 1, 4)],
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
    w = tl.load(w_ptr + base + at, mask=at < k, other=0).to(tl.float32)
    tl.store(out_ptr + base + at, (w * tl.load(scale_ptr + row)).to(out_ptr.dtype.element_ty), mask=at < k)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """out [n, k] 16-bit = codes [n, k] int8 * scale [n] f32, rounded once. Kernels read and write 3 bytes a weight."""
    if not codes.is_cuda and not INTERPRETED:
        torch.mul(codes, scale[:, None], out=out)
        return
    n, k = codes.shape
    block = min(4096, next_pow2(k))
    dequantize_kernel[(n, triton.cdiv(k, block))](codes, scale, out, k, BLOCK=block, num_warps=4)


class Int8WeightOnlyLinear(NaturalLinear):
    """int8 weights times 16-bit activations."""

    name = "int8_weight_only"
    kind = "int8_weight"
    weight_dtypes = (torch.int8,)
    x_dtypes = (torch.bfloat16, torch.float16)
    quantized_x = False
    gemv_tiles = _GEMV
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
