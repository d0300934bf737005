"""Rotary positions and the paged KV cache on a CPU.

**RoPE** in the half-split (Hugging Face) form, pairs (i, i + half), as three calls: with C = [cos, cos] and
S = [-sin, sin] of a token's position, y = x * C + roll(x, half) * S.

**KV cache** of a layer: [slots, 2 * kv_heads, head_dim], a slot's keys first, then its values, so that a token is one
contiguous row of the stacked qkv and is stored by one call. Slot = block * block_size + offset. An unquantized cache
holds float32, the compute dtype (bf16 would round what transformers in float32 does not). A quantized cache holds codes
of x / scale, e4m3 saturated at 448 or int8 in [-127, 127], with calibrated scales of a layer's keys and of its values,
one a tensor or one a head; codes become float32 when they are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from engines.kernels.cpu.rows import FP8_MAX, INT8_MAX


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's slots. ``scale`` float32 [2 * kv_heads, 1] and ``code`` for a cache of codes, else None."""

    slots: torch.Tensor
    scale: torch.Tensor | None
    code: torch.dtype | None = None

    @classmethod
    def empty(cls, num_slots: int, kv_heads: int, head_dim: int, scales: torch.Tensor | None = None,
              dtype: str = "fp8_e4m3") -> LayerCache:
        """``scales`` float32 [2 * kv_heads], keys' first, makes a cache of fp8_e4m3 or int8 codes.

        All zeros, for a masked slot is still multiplied by 0 and must not hold NaN; but numpy's zeros are pages that
        the system fills when they are first touched, so memory is taken only where tokens are stored.
        """
        shape = (num_slots, 2 * kv_heads, head_dim)
        if scales is None:
            return cls(torch.from_numpy(np.zeros(shape, np.float32)), None)
        code = torch.int8 if dtype == "int8" else torch.float8_e4m3fn
        return cls(torch.from_numpy(np.zeros(shape, np.uint8)), scales.unsqueeze(1), code)

    def store(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Store rows kv [t, 2 * kv_heads, head_dim] at slots int64 [t]."""
        if self.scale is not None:
            assert self.code is not None
            kv = kv / self.scale
            kv = (kv.round_().clamp_(-INT8_MAX, INT8_MAX) if self.code is torch.int8
                  else kv.clamp_(-FP8_MAX, FP8_MAX)).to(self.code).view(torch.uint8)
        self.slots.index_copy_(0, slots, kv)

    def gather(self, blocks: torch.Tensor, block_size: int) -> torch.Tensor:
        """float32 rows of whole blocks int64 [b] -> [b * block_size, 2 * kv_heads, head_dim]: one copy a block."""
        heads, dim = self.slots.shape[1:]
        whole = self.slots.view(-1, block_size * heads * dim)
        return self._values(torch.embedding(whole, blocks).view(-1, heads, dim))

    def span(self, start: int, length: int) -> torch.Tensor:
        """float32 rows of a contiguous run of slots; a view where the cache is float32."""
        return self._values(self.slots.narrow(0, start, length))

    def _values(self, rows: torch.Tensor) -> torch.Tensor:
        if self.scale is None or self.code is None:
            return rows
        return rows.view(self.code).float().mul_(self.scale)


def inverse_frequencies(kind: str, head_dim: int, theta: float, factor: float, low: float, high: float,
                        original: int) -> torch.Tensor:
    """float32 [head_dim / 2]: theta^(-2i/d), divided by ``factor`` for linear scaling.

    llama3 divides only wavelengths beyond original / low, keeps those below original / high, and blends in between.
    """
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if kind == "linear":
        return inverse / factor
    if kind == "llama3":
        wavelength = 2 * math.pi / inverse
        blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - blend) * inverse / factor + blend * inverse
    return inverse


def rotary_table(inverse: torch.Tensor, max_position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """C and S of every position, float32 [max_position, head_dim] each."""
    angle = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse[None, :]
    return torch.cat([angle.cos(), angle.cos()], -1), torch.cat([-angle.sin(), angle.sin()], -1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [t, heads, head_dim] in place; cos and sin (C and S above) [t, 1, head_dim]."""
    rolled = torch.roll(x, x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(rolled, sin)
