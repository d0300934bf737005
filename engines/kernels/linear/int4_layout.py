"""Where each 4-bit weight lies: one storage order, made for the tensor core's own registers.

The matrix instructions ``mma.m16n8k16`` (16-bit) and ``mma.m16n8k32`` (int8), and Hopper's ``wgmma`` with operand A in
registers, want A spread over a warp: lane ``l`` holds rows ``r = l // 4`` and ``r + 8`` at column positions that
depend only on ``c = l % 4``. So weights are stored in the order in which lanes will hold them, and a 16-byte load per
lane *is* the operand, after a few bit operations:

    words  int32 [tiles, chunks, 32 lanes, 4]        tiles = ceil(n / 16), chunks = padded k / 64
      word i (0..3) of lane (r, c) holds 2 rows x 4 inputs:
        row  = 16 tile + 8 h + r                       h = 0, 1
        k    = 64 chunk + 16 i + 8 (e // 2) + 2 c + e % 2              e = 0..3    (A16)
        k    = 64 chunk + 32 (i // 2) + 8 c + 4 (i % 2) + e                        (A8)
      so a warp's load of one chunk is 512 contiguous bytes = a 16 x 64 block of weights. A16's word i is one
      instruction of 16 inputs in their natural order, as activations in shared memory have it; A8's four lanes of one r
      read 8 contiguous activations each, an order that both operands then share.

The place of a nibble inside its word serves the arithmetic:

    order  nibble p holds      code        read as
    A16    h = p % 2,          q + 8       pairs (p, p + 4): ``(w >> 4 p) & 0x000f000f | 0x43004300`` is two bf16
           e = 2 (p % 4 // 2)              numbers 128 + (q + 8), neighbours in k of one row; minus 136 is q
             + p // 4
    A8     h = p % 2,          q (two's    bytes: ``(w << 4) & 0xf0f0f0f0`` is four int8 numbers 16 q of row r,
           e = p // 2          complement) ``w & 0xf0f0f0f0`` the same four inputs of row r + 8

Scales lie so that a lane finds those of its two rows side by side, for as many groups as 16 bytes hold:

    scales [tiles, padded groups / P, 8 r, P, 2 h]    P = 4 for float16 and bfloat16, 2 for float32

They are stored in float16 or bfloat16 only when that is exact for every scale, otherwise in float32 (3 % more bytes at
group 128): ``unpack`` is the exact inverse of ``pack`` whatever the checkpoint holds. k is padded to whole runs of four
groups, n to whole tiles; padding has q = 0 and scale 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from calib.errors import ToolkitError
from engines.kernels.impl import Packed

__all__ = ["CHUNK", "GROUPS", "ROWS", "RUN", "Geometry", "Int4WeightError", "Order", "dequantize", "pack_int4",
           "scales_per_load", "unpack_int4"]

ROWS = 16
CHUNK = 64
RUN = 4
"""Groups per run: the unit of k that one warp takes at a time."""
GROUPS = (32, 64, 128)


class Order(IntEnum):
    """Nibble order inside a word (module docstring)."""

    A16 = 0
    A8 = 1


class Int4WeightError(ToolkitError):
    """A weight or scale that cannot be a 4-bit linear's."""

    code = "int4_weight"


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the stored form of an [n, k] weight with groups of ``group`` inputs."""

    n: int
    k: int
    group: int

    @property
    def tiles(self) -> int:
        return -(-self.n // ROWS)

    @property
    def padded_k(self) -> int:
        run = RUN * self.group
        return -(-self.k // run) * run

    @property
    def chunks(self) -> int:
        return self.padded_k // CHUNK

    @property
    def runs(self) -> int:
        return self.padded_k // (RUN * self.group)

    @property
    def groups(self) -> int:
        return self.padded_k // self.group


def pack_int4(weight: torch.Tensor, weight_scale: torch.Tensor | None, order: Order) -> Packed:
    """int8 codes [n, k] in [-8, 7] and float32 scales [n, k / group] -> ``words`` and ``scales`` (module docstring).

    Raises Int4WeightError for codes out of range, missing, non-finite or non-positive scales, and unknown groups.
    """
    geometry, scale = _checked(weight, weight_scale)
    n, k = geometry.n, geometry.k
    codes = torch.zeros(geometry.tiles * ROWS, geometry.padded_k, dtype=torch.int8, device=weight.device)
    codes[:n, :k] = weight
    codes = codes + 8 if order is Order.A16 else codes & 15
    blocks = codes.view(geometry.tiles, 2, 8, geometry.chunks, *_inner_axes(order))
    nibbles = blocks.permute(*_nibble_axes(order)).reshape(geometry.tiles, geometry.chunks, 32, 4, 8)
    words = torch.zeros(nibbles.shape[:-1], dtype=torch.int32, device=weight.device)
    for p in range(8):
        words |= nibbles[..., p].to(torch.int32) << (4 * p)
    stored = scale.to(_exact_dtype(scale))
    padded = torch.zeros(geometry.tiles * ROWS, geometry.groups, dtype=stored.dtype, device=weight.device)
    padded[:n, : k // geometry.group] = stored
    per_load = scales_per_load(stored.dtype)
    scales = padded.view(geometry.tiles, 2, 8, geometry.groups // per_load, per_load).permute(0, 3, 2, 4, 1)
    return Packed({"words": words, "scales": scales.contiguous()}, n, k, geometry.group)


def unpack_int4(packed: Packed, order: Order) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact inverse of ``pack_int4``: int8 codes [n, k], float32 scales [n, k / group]."""
    geometry = Geometry(packed.n, packed.k, packed.group)
    words = packed.tensors["words"]
    nibbles = torch.stack([(words >> (4 * p)) & 15 for p in range(8)], -1).to(torch.int8)
    axes = _nibble_axes(order)
    blocks = nibbles.view(geometry.tiles, geometry.chunks, 8, 4, 2, 2, 2, 2, 2)
    codes = blocks.permute(*[axes.index(i) for i in range(9)]).reshape(geometry.tiles * ROWS, geometry.padded_k)
    codes = codes - 8 if order is Order.A16 else torch.where(codes > 7, codes - 16, codes)
    scales = packed.tensors["scales"].permute(0, 4, 2, 1, 3).reshape(geometry.tiles * ROWS, geometry.groups)
    return (codes[: packed.n, : packed.k].contiguous(),
            scales[: packed.n, : packed.k // packed.group].float().contiguous())


def dequantize(packed: Packed, order: Order) -> torch.Tensor:
    """The weight [n, k] in float32: code times its group's scale."""
    codes, scales = unpack_int4(packed, order)
    return codes.float() * scales.repeat_interleave(packed.group, 1)


def scales_per_load(dtype: torch.dtype) -> int:
    """Groups whose two scales fill a lane's 16-byte load."""
    return 2 if dtype == torch.float32 else 4


def _inner_axes(order: Order) -> tuple[int, ...]:
    """How the k of a chunk divides: (i2, i1, e1, c, e0) for A16, (i2, c, i1, e1, e0) for A8."""
    return (2, 2, 2, 4, 2) if order is Order.A16 else (2, 4, 2, 2, 2)


def _nibble_axes(order: Order) -> tuple[int, ...]:
    """Axes (tile h r chunk, then ``_inner_axes``) in storage order: tile chunk r c i2 i1, then nibble bits 2, 1, 0."""
    return (0, 3, 2, 7, 4, 5, 8, 6, 1) if order is Order.A16 else (0, 3, 2, 5, 4, 6, 7, 8, 1)


def _exact_dtype(scale: torch.Tensor) -> torch.dtype:
    """The narrowest storage type that holds every scale exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scale.to(dtype).float(), scale):
            return dtype
    return torch.float32


def _checked(weight: torch.Tensor, weight_scale: torch.Tensor | None) -> tuple[Geometry, torch.Tensor]:
    if weight_scale is None:
        raise Int4WeightError("a 4-bit weight came without scales", "The checkpoint lacks weight_scale for this layer.")
    if weight.dtype != torch.int8 or weight.dim() != 2 or weight.numel() == 0:
        raise Int4WeightError(f"expected int8 codes [n, k], got {weight.dtype} {list(weight.shape)}",
                              "Unpack the checkpoint's weight to one int8 per code first.")
    n, k = weight.shape
    rows, groups = weight_scale.shape if weight_scale.dim() == 2 else (0, 0)
    if rows != n or groups == 0 or k % groups or k // groups not in GROUPS:
        raise Int4WeightError(f"scales {list(weight_scale.shape)} do not give groups of {GROUPS} for codes [{n}, {k}]",
                              "Calibrate with a group size of 32, 64 or 128 that divides the layer's inputs.")
    low, high = (int(v) for v in torch.aminmax(weight))
    if low < -8 or high > 7:
        raise Int4WeightError(f"codes reach from {low} to {high}", "4-bit symmetric codes lie in [-8, 7].")
    scale = weight_scale.float()
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        broken = int((~(scale > 0) | ~torch.isfinite(scale)).sum())
        raise Int4WeightError(f"{broken} scales are not finite and positive",
                              "The checkpoint is damaged or was calibrated on broken activations.")
    return Geometry(n, k, k // groups), scale
