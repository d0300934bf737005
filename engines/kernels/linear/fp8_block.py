"""W8A8 in fp8 with fine scales, as DeepSeek-V3 was trained: a scale for a 128 x 128 tile of the weight, one for 128
inputs of a token.

    out[t, r] = sum_g weight_scale[r, g] * x_scale[t, g] * sum_{c in g} x[t, c] weight[r, c]     codes e4m3, fp32 sums

Layout::

    weight        [n, k]        e4m3, natural (see natural)
    weight_scale  [k / 128, n]  fp32: a tile's scale repeated for its rows, as the stacked parts of a weight need not
                                begin where a tile does; a step of the kernel reads one run of it
    x_scale       [m, k / 128]  fp32

One body, the swapped dot with BLOCK_K = 128: scales change along k, so each step is scaled before it is added (``dot``,
``KIND`` fp8_block). It costs two multiplications an element of the output tile and step, nothing where reading weights
is the limit. torch has no operator for it here; on a CPU the codes are widened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from engines.kernels.impl import DeviceFacts, KernelConfig, LinearShape, Packed
from engines.kernels.linear.candidates import DotTiles, GemvTile, MmTile
from engines.kernels.linear.fp8 import Fp8Linear

BLOCK = 128
_DOT = {
    16: DotTiles([(64, BLOCK, 4, 5, 4), (64, BLOCK, 2, 5, 4), (64, BLOCK, 1, 6, 4)], [(64, BLOCK, 1, 6, 4)]),
    64: DotTiles([(64, BLOCK, 2, 5, 4), (64, BLOCK, 1, 5, 4)], [(128, BLOCK, 1, 4, 8), (64, BLOCK, 1, 5, 4)]),
    256: DotTiles([(64, BLOCK, 2, 4, 8), (64, BLOCK, 1, 4, 8), (64, BLOCK, 1, 2, 8)],
                  [(64, BLOCK, 1, 4, 8), (64, BLOCK, 1, 2, 8)]),
}  # a step's sum and the total are both in registers: 128 x 256 does not fit


class Fp8BlockLinear(Fp8Linear):
    """e4m3 weights with scales [n, k / 128] times e4m3 activations with scales [m, k / 128]."""

    name = "fp8_block"
    kind = "fp8_block"
    gemv_tiles: ClassVar[dict[int, list[GemvTile]]] = {}
    dot_tiles = _DOT
    mm_tiles: ClassVar[list[MmTile]] = []

    def supports(self, shape: LinearShape, device: DeviceFacts) -> str | None:
        if shape.group != BLOCK or shape.k % BLOCK:
            return f"fp8_block kernels take blocks of {BLOCK} inputs that divide k, not {shape.group} and k = {shape.k}"
        return super().supports(LinearShape(shape.m, shape.n, shape.k), device)

    def pack(self, weight: torch.Tensor, weight_scale: torch.Tensor | None = None, *,
             bias: torch.Tensor | None = None) -> Packed:
        """``weight`` [n, k] e4m3, ``weight_scale`` [n, k / 128]. Raises ValueError as ``natural`` does."""
        wanted = (weight.shape[0], weight.shape[1] // BLOCK)
        if weight_scale is None or tuple(weight_scale.shape) != wanted or weight.shape[1] % BLOCK:
            found = None if weight_scale is None else tuple(weight_scale.shape)
            raise ValueError(f"{self.name} scales of a weight {tuple(weight.shape)} are {wanted}, got {found}")
        if not bool(torch.isfinite(weight_scale).all()) or bool((weight_scale <= 0).any()):
            raise ValueError(f"{self.name} scales must be finite and positive")
        one = super().pack(weight, torch.ones((), device=weight.device), bias=bias)
        tensors = {**one.tensors, "weight_scale": weight_scale.to(torch.float32).t().contiguous()}
        return Packed(tensors, one.n, one.k, BLOCK)

    def unpack(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor | None]:
        return packed.tensors["weight"], packed.tensors["weight_scale"].t().contiguous()

    def candidates(self, shape: LinearShape, device: DeviceFacts) -> Sequence[KernelConfig]:
        """As ``natural``; every BLOCK_K is 128, whatever leads."""
        return [config for config in super().candidates(shape, device)
                if config.kernel == "torch" or config["BLOCK_K"] == BLOCK]

    def torch_runs(self, shape: LinearShape, device: DeviceFacts) -> bool:
        return False

    def launch_torch(self, x: torch.Tensor, packed: Packed, out: torch.Tensor, x_scale: torch.Tensor | None,
                     workspace: torch.Tensor | None) -> None:
        out.copy_(self.twin(x, packed, x_scale=x_scale))

    def twin(self, x: torch.Tensor, packed: Packed, *, x_scale: torch.Tensor | None = None) -> torch.Tensor:
        """The same sum in plain torch, float64 inside."""
        assert x_scale is not None
        weight = packed.tensors["weight"].double() * packed.tensors["weight_scale"].t().repeat_interleave(BLOCK, 1)
        y = (x.double() * x_scale.double().repeat_interleave(BLOCK, 1)) @ weight.t()
        return (y + packed.tensors["bias"].double() if "bias" in packed.tensors else y).float()

    def _check_scale(self, x: torch.Tensor, packed: Packed, x_scale: torch.Tensor | None) -> None:
        wanted = (x.shape[0], packed.k // BLOCK)
        if x_scale is None or tuple(x_scale.shape) != wanted or not x_scale.is_contiguous():
            raise ValueError(f"x_scale is contiguous {wanted}, got {None if x_scale is None else tuple(x_scale.shape)}")
