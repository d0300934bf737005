"""W4A8: 4-bit group-wise weights, int8 activations with a scale per token and group of inputs.

    out[t, r] = sum_g scale[r, g] * x_scale[t, g] * sum_{k in g} q[r, k] * c[t, k]     q in [-8, 7], c in [-127, 127]

The inner sum is exact, in int32 as in fp32 (at most 128 * 8 * 127, times 16 where kernels hold 16 q); only the outer
sum over groups rounds. ``mm`` and folded ``dot16`` round the operands to 16 bits first. Activations come from a kernel
with the ``INT8_GROUP`` epilogue (``engines.kernels.jit``), whose scale multiplies the code. The activation rounding
costs about 0.6 % of a vector's norm, so this is a scheme of its own, not a faster way to run W4A16.

``mma`` up to 32 tokens; for more ``dot16`` (activations widened to 16 bits first), which is 10 to 25 % ahead of ``dot``
(int8 x int8) but for small weights at 32 to 128 tokens; ``mm`` (both sides widened to 16 bits) for prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

import torch

from engines.kernels.impl import DeviceFacts, KernelConfig, LinearShape, Packed
from engines.kernels.linear.int4_layout import Order
from engines.kernels.linear.int4_linear import Int4Linear, check_shapes, dot_configs, mma_configs, unpack_config

__all__ = ["Int4A8"]

_ONE = ((8, 4, 1, 0, 1), (8, 2, 1, 0, 1), (4, 2, 1, 0, 1), (4, 4, 1, 0, 1), (8, 4, 1, 2, 1), (16, 2, 1, 0, 1),
        (8, 2, 2, 0, 1), (8, 4, 2, 0, 1))
_EIGHT = ((8, 4, 2, 0, 8), (8, 4, 1, 0, 8), (4, 4, 1, 0, 8), (2, 2, 2, 0, 0), (8, 2, 2, 0, 0), (4, 4, 2, 0, 8),
          (2, 4, 2, 0, 8), (8, 4, 2, 1, 0))
_MORE = ((8, 4, 2, 0, 0), (4, 4, 2, 0, 0), (4, 2, 2, 0, 0), (8, 2, 2, 0, 0), (8, 4, 1, 0, 0))
_FEW = ((4, 2, 2, 0, 0), (8, 4, 2, 0, 0), (8, 2, 2, 0, 0), (4, 4, 2, 0, 0))
_DOT = ((64, 4, 3, 0), (128, 8, 3, 0), (64, 4, 4, 0), (128, 8, 4, 0))
_FEW_DOT16 = ((64, 4, 4, 0), (128, 8, 3, 2), (64, 4, 4, 2))
_DOT16 = ((64, 4, 3, 2), (128, 8, 3, 2), (64, 4, 4, 2), (64, 4, 3, 0), (128, 8, 3, 0), (128, 8, 3, 1))
# (warps, UNIT, RT, programs per SM, STAGED) and (BLOCK_N, warps, stages, FOLD); fastest first on an H200, 2026-11-30
_MOST = 24


class Int4A8(Int4Linear):
    """x int8 codes [m, k] with x_scale float32 [m, k / group], out bf16 or fp16."""

    name = "int4_a8"
    order = Order.A8

    def candidates(self, shape: LinearShape, device: DeviceFacts) -> Sequence[KernelConfig]:
        """At most about 25 configurations, likely winner first; never empty for a supported shape."""
        pdl = device.capability >= 90
        tiles = _ONE if shape.m == 1 else _EIGHT if shape.m <= 8 else _MORE if shape.m <= 16 else _FEW
        few = mma_configs(shape, tiles, device, pdl=pdl)
        if few and shape.m <= 8:
            return few
        unpack = [unpack_config(shape, pdl)] if shape.m >= 256 or not device.capability else []
        if shape.m > 1024:
            return unpack
        many = dot_configs(shape, device, _DOT if shape.m > 32 else _DOT[:3], pdl=pdl)
        if shape.m <= 16:
            return few + many + unpack
        wide = dot_configs(shape, device, _DOT16 if shape.m > 32 else _FEW_DOT16, pdl=pdl, kernel="dot16")
        if shape.m <= 32:  # bound by reading: the most programs that a tile allows lead
            wide, many = (sorted(found, key=lambda config: -config["SPLIT_K"]) for found in (wide, many))
        turns = [config for config in chain(*zip_longest(wide, many)) if config is not None]  # a short race sees both
        turns = turns[:_MOST - len(few) - len(unpack)]
        return few[:2] + turns[:2] + unpack + turns[2:] + few[2:]

    def check(self, x: torch.Tensor, packed: Packed, out: torch.Tensor, x_scale: torch.Tensor | None) -> None:
        """Raises ValueError when the operands do not fit."""
        check_shapes(self.name, x, packed, out)
        wanted = (x.shape[0], packed.k // packed.group)
        if x.dtype != torch.int8 or x_scale is None or x_scale.dtype != torch.float32:
            raise ValueError(f"{self.name}: x is {x.dtype} with x_scale "
                             f"{None if x_scale is None else x_scale.dtype}, expected int8 with float32")
        if tuple(x_scale.shape) != wanted or not x_scale.is_contiguous():
            raise ValueError(f"{self.name}: x_scale {list(x_scale.shape)} must be contiguous {list(wanted)}")

    def twin(self, x: torch.Tensor, packed: Packed, *, x_scale: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [m, n] in plain torch."""
        if x_scale is None:
            raise ValueError(f"{self.name}: x_scale is missing")
        return self.product(x.float() * x_scale.repeat_interleave(packed.group, 1), packed)
