"""Rotary positions and the paged KV cache on a CPU.

**RoPE** in the half-split (Hugging Face) form, pairs (i, i + half), as three calls: with C = [cos, cos] and
S = [-sin, sin] of a token's position, y = x * C + roll(x, half) * S. Dimensions beyond C's width pass through.

**KV cache** of a layer: [slots, 2 * kv_heads, head_dim], a slot's keys first, then its values, so that a token is one
contiguous row of the stacked qkv and is stored by one call. Slot = block * block_size + offset. An unquantized cache
holds float32, the compute dtype (bf16 would round what transformers in float32 does not). A quantized cache holds codes
of x / scale, e4m3 saturated at 448 or int8 in [-127, 127], with calibrated scales of a layer's keys and of its values,
one a tensor or one a head; codes become float32 when they are read.
"""

from __future__ import annotations

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


def rotary_table(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """C = [cos, cos] and S = [-sin, sin] of every position, float32 [positions, rotary_dim] each."""
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first dimensions of x [t, heads, head_dim] in place; C and S [t, 1, rotary_dim]."""
    width = cos.shape[-1]
    turned = x if width == x.shape[-1] else x.narrow(-1, 0, width)
    rolled = torch.roll(turned, width // 2, -1)
    turned.mul_(cos).addcmul_(rolled, sin)
    return x
