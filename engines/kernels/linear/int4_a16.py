"""W4A16: 4-bit group-wise weights, 16-bit activations.

    out[t, r] = sum_g scale[r, g] * sum_{k in g} q[r, k] * x[t, k]         q in [-8, 7], group 32, 64 or 128

What is exact: every q and every scale (``int4_layout`` stores scales in 16 bits only where that loses nothing), and in
``mma`` and unfolded ``dot`` also every product, summed in fp32 within a group and over groups. ``mm`` and folded
``dot`` round q * scale to 16 bits, as a dequantized checkpoint would.

Which kernel when (8B model, one H200; docs/kernels/int4.md has the measurements): ``mma`` up to 16 or 32 tokens, where
reading the weights is all that counts; ``dot`` to a few hundred; ``mm`` beyond.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engines.kernels.impl import DeviceFacts, KernelConfig, LinearShape, Packed
from engines.kernels.linear.int4_layout import Order
from engines.kernels.linear.int4_linear import Int4Linear, check_shapes, dot_configs, mma_configs, unpack_config

__all__ = ["Int4A16"]

_ONE = ((8, 2, 1, 0, 1), (16, 2, 1, 0, 1), (8, 2, 2, 0, 1), (4, 4, 1, 0, 1), (8, 4, 1, 0, 1), (4, 2, 1, 0, 1),
        (8, 4, 1, 2, 1), (2, 4, 1, 0, 1))
_EIGHT = ((16, 2, 1, 0, 0), (8, 2, 1, 0, 8), (16, 2, 1, 2, 0), (8, 2, 1, 0, 0), (8, 4, 2, 0, 0), (8, 2, 2, 0, 8),
          (4, 2, 1, 0, 0), (4, 4, 1, 0, 8))
_MORE = ((8, 2, 2, 0, 0), (4, 2, 2, 0, 0), (8, 4, 2, 0, 0), (4, 4, 2, 0, 0), (8, 4, 1, 0, 0))
_FEW_DOT = ((64, 4, 4, 0), (128, 8, 3, 0), (128, 4, 3, 0))
_DOT = ((128, 8, 3, 0), (64, 4, 3, 0), (128, 8, 3, 1), (64, 4, 4, 0), (128, 8, 4, 0))
# (warps, UNIT, RT, programs per SM, STAGED) and (BLOCK_N, warps, stages, FOLD); fastest first on an H200, 2026-11-29


class Int4A16(Int4Linear):
    """x bf16 or fp16 [m, k], out of the same type."""

    name = "int4_a16"
    order = Order.A16

    def candidates(self, shape: LinearShape, device: DeviceFacts) -> Sequence[KernelConfig]:
        """At most about 25 configurations, likely winner first; never empty for a supported shape."""
        pdl = device.capability >= 90
        few = mma_configs(shape, _ONE if shape.m == 1 else _EIGHT if shape.m <= 8 else _MORE, device, pdl=pdl)
        if few and shape.m <= 8:
            return few
        many = dot_configs(shape, device, _DOT if shape.m > 32 else _FEW_DOT, pdl=pdl) if shape.m <= 1024 else []
        unpack = [unpack_config(shape, pdl)] if shape.m >= 128 or not device.capability else []
        if shape.m >= 256:
            return unpack + many
        return few + many + unpack if shape.m <= 16 else many + few + unpack

    def check(self, x: torch.Tensor, packed: Packed, out: torch.Tensor, x_scale: torch.Tensor | None) -> None:
        """Raises ValueError when the operands do not fit."""
        check_shapes(self.name, x, packed, out)
        if x.dtype != out.dtype or x_scale is not None:
            raise ValueError(f"{self.name}: x {x.dtype} and out {out.dtype} must be one 16-bit type, without x_scale")

    def twin(self, x: torch.Tensor, packed: Packed, *, x_scale: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [m, n] in plain torch."""
        return self.product(x.float(), packed)
