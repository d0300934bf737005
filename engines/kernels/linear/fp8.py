"""W8A8 in fp8: e4m3 weights and activations, scales outside the sum.

    out[t, r] = x_scale[t] * weight_scale[r] * sum_c x[t, c] weight[r, c]     codes e4m3, accumulator fp32

The activation scale is static ([], one number a tensor) or per token ([m]); the weight scale one number a row (or one a
tensor, repeated). Neither changes along k, so both stand in the epilogue: scaling inside the main loop halves the
speed on Hopper. Weights are natural [n, k] (see natural), which torch._scaled_mm reads as well.

On the tensor cores products of a tile are accumulated with about 14 bits (Hopper's fp8 accumulator, no promotion), as
cuBLAS does with fast accumulation; the GEMV is more exact than that (see gemv). e4m3 conversion instructions begin with
compute capability 8.9. On a CPU the codes are widened and multiplied in fp32: right, and slow.
"""

from __future__ import annotations

import torch

from engines.kernels.impl import DeviceFacts, LinearShape, Packed
from engines.kernels.linear.candidates import DotTiles, GemvTile, MmTile
from engines.kernels.linear.natural import NaturalLinear

_GEMV: dict[int, list[GemvTile]] = {
    1: [(4, 256, 0, 2), (2, 256, 0, 4), (4, 64, 0, 1), (4, 256, 0, 4), (8, 256, 0, 4), (1, 256, 0, 4)],
    2: [(2, 256, 0, 4), (4, 64, 0, 1), (4, 128, 0, 2), (4, 256, 0, 4)],
    4: [(4, 64, 0, 1), (2, 256, 0, 4)],
}
_DOT = {
    16: DotTiles([(64, 256, 1, 6, 4), (64, 256, 4, 4, 4), (64, 256, 2, 4, 4), (64, 256, 1, 4, 4), (64, 512, 1, 3, 4)],
                 [(64, 256, 1, 4, 4), (128, 256, 1, 3, 8), (128, 128, 1, 5, 8)]),
    64: DotTiles([(64, 256, 1, 6, 4), (64, 256, 2, 4, 4), (64, 256, 1, 4, 4), (64, 512, 1, 3, 4)],
                 [(128, 128, 1, 4, 4), (128, 128, 1, 5, 8)]),
    256: DotTiles([(64, 128, 2, 4, 4), (64, 128, 1, 5, 4), (64, 256, 1, 3, 4), (64, 256, 2, 3, 4)],
                  [(128, 128, 1, 4, 8), (128, 128, 1, 3, 8)]),
}
_MM: list[MmTile] = [(128, 256, 128, 3, 8, 1), (256, 128, 128, 3, 8, 1), (128, 256, 128, 4, 8, 2),
                     (128, 128, 128, 4, 4, 1)]


def needs_e4m3(device: DeviceFacts) -> str | None:
    """None, or why e4m3 codes cannot be read on ``device``."""
    if 0 < device.capability < 89:
        return f"fp8 (e4m3) needs compute capability 8.9, {device.name} has {device.capability / 10:.1f}"
    return None


class Fp8Linear(NaturalLinear):
    """e4m3 weights times e4m3 activations; activation scale per tensor or per token."""

    name = "fp8"
    kind = "fp8"
    weight_dtypes = (torch.float8_e4m3fn,)
    gemv_tiles = _GEMV
    dot_tiles = _DOT
    mm_tiles = _MM
    x_dtypes = (torch.float8_e4m3fn,)

    def supports(self, shape: LinearShape, device: DeviceFacts) -> str | None:
        return needs_e4m3(device) or super().supports(shape, device)

    def torch_runs(self, shape: LinearShape, device: DeviceFacts) -> bool:
        return shape.n % 16 == 0 and shape.k % 16 == 0

    def launch_torch(self, x: torch.Tensor, packed: Packed, out: torch.Tensor, x_scale: torch.Tensor | None,
                     workspace: torch.Tensor | None) -> None:
        assert x_scale is not None
        weight, w_scale = packed.tensors["weight"], packed.tensors["weight_scale"]
        bias = packed.tensors.get("bias")
        if not x.is_cuda:
            y = (x.float() @ weight.float().t()) * w_scale * x_scale.reshape(-1, 1)
            out.copy_(y if bias is None else y + bias.float())
            return
        if packed.facts["per_tensor"] and x_scale.ndim == 0:
            scales = x_scale, w_scale[0]
        else:
            scales = x_scale.reshape(-1, 1).expand(x.shape[0], 1).contiguous(), w_scale[None, :]
        torch._scaled_mm(x, weight.t(), *scales, bias=bias, out_dtype=out.dtype, use_fast_accum=True, out=out)
