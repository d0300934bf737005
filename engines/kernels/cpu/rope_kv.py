"""Rotary positions and the paged KV cache on a CPU.

**RoPE** in the half-split (Hugging Face) form, pairs (i, i + half), as three calls: with C = [cos, cos] and
S = [-sin, sin] of a token's position, y = x * C + roll(x, half) * S.

**KV cache** of a layer: [slots, 2 * kv_heads, head_dim], a slot's keys first, then its values, so that a token is one
contiguous row of the stacked qkv and is stored by one call. Slot = block * block_size + offset. An unquantized cache
holds float32, the compute dtype (bf16 would round what transformers in float32 does not). An fp8 cache holds e4m3 codes
of x / scale, saturated at 448, with one calibrated scale for a layer's keys and one for its values; codes become
float32 when they are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from engines.kernels.cpu.rows import FP8_MAX


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's slots. ``scale`` float32 [2 * kv_heads, 1] for an fp8 cache, None for a float32 one."""

    slots: torch.Tensor
    scale: torch.Tensor | None

    @classmethod
    def empty(cls, num_slots: int, kv_heads: int, head_dim: int, scales: tuple[float, float] | None) -> LayerCache:
        """``scales`` = (k_scale, v_scale) makes an fp8 cache.

        All zeros, for a masked slot is still multiplied by 0 and must not hold NaN; but numpy's zeros are pages that
        the system fills when they are first touched, so memory is taken only where tokens are stored.
        """
        shape = (num_slots, 2 * kv_heads, head_dim)
        if scales is None:
            return cls(torch.from_numpy(np.zeros(shape, np.float32)), None)
        scale = torch.tensor(scales).repeat_interleave(kv_heads).unsqueeze(1)
        return cls(torch.from_numpy(np.zeros(shape, np.uint8)), scale)

    def store(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Store rows kv [t, 2 * kv_heads, head_dim] at slots int64 [t]."""
        if self.scale is not None:
            kv = (kv / self.scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
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
        if self.scale is None:
            return rows
        return rows.view(torch.float8_e4m3fn).float().mul_(self.scale)


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
