"""W8A8 in int8: channel scales on the weight, token scales on the activation, an exact integer sum.

    out[t, r] = x_scale[t] * weight_scale[r] * sum_c x[t, c] weight[r, c]     codes int8, accumulator int32

The int32 sum cannot overflow below k = 133,000 (127 * 127 * k < 2^31), so every body, tile and split gives the same
integer; only the last rounding remains. Weights are natural [n, k] (see natural).

Bodies: ``dp4a`` GEMV, swapped IGMMA dot, persistent IGMMA mm with the scales in its epilogue. torch._int_mm stores
int32 and needs a second pass for the scales (and more than 16 tokens on CUDA): kept as a candidate of medium sizes.
"""

from __future__ import annotations

import torch

from engines.kernels.impl import DeviceFacts, LinearShape, Packed
from engines.kernels.linear.candidates import DotTiles, GemvTile, MmTile
from engines.kernels.linear.natural import NaturalLinear

MAX_K = (2**31 - 1) // (128 * 128)

_GEMV: dict[int, list[GemvTile]] = {
    1: [(4, 512, 0, 2), (4, 128, 0, 1), (4, 512, 0, 4), (2, 512, 0, 4), (8, 256, 0, 4)],
    2: [(4, 256, 0, 2), (2, 512, 0, 4), (4, 128, 0, 1), (4, 512, 0, 4)],
    4: [(4, 128, 0, 1), (2, 512, 0, 4), (2, 256, 0, 2)],
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


class Int8Linear(NaturalLinear):
    """int8 weights times int8 activations."""

    name = "int8"
    kind = "int8"
    weight_dtypes = (torch.int8,)
    gemv_tiles = _GEMV
    dot_tiles = _DOT
    mm_tiles = _MM
    torch_first = False
    x_dtypes = (torch.int8,)

    def supports(self, shape: LinearShape, device: DeviceFacts) -> str | None:
        if shape.k > MAX_K:
            return f"an int8 sum over k = {shape.k} may overflow int32, at most {MAX_K} cannot"
        return super().supports(shape, device)

    def torch_runs(self, shape: LinearShape, device: DeviceFacts) -> bool:
        return 16 < shape.m <= 4096 and shape.n % 8 == 0 and shape.k % 8 == 0

    def launch_torch(self, x: torch.Tensor, packed: Packed, out: torch.Tensor, x_scale: torch.Tensor | None,
                     workspace: torch.Tensor | None) -> None:
        assert x_scale is not None
        y = torch._int_mm(x, packed.tensors["weight"].t()).float()
        y.mul_(packed.tensors["weight_scale"]).mul_(x_scale.reshape(-1, 1))
        if "bias" in packed.tensors:
            y.add_(packed.tensors["bias"])
        out.copy_(y)
