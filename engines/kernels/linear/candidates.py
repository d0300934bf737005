"""Which launch configurations are worth timing for a shape: short lists, best guess first.

A full product of tile sizes has thousands of members and a best/worst ratio of 1.6 to 10; these lists hold what won or
came close in sweeps on one H200 (docs/kernels/linear.md), cut to what the shape and the device allow. The tuner times
what is left; the first entry is the default when nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import triton

from engines.kernels.impl import DeviceFacts, KernelConfig, LinearShape
from engines.kernels.jit import next_pow2

HOPPER = 90
MAX_TOKENS = 256  # widest token tile of the dot body
_FLAT_TOKENS = 1024
_SHARED_RESERVE = 2048  # barriers and the compiler's own scratch

GemvTile = tuple[int, int, int, int]
"""BLOCK_N, BLOCK_K (units), LOOP, num_warps."""
DotTile = tuple[int, int, int, int, int]
"""BLOCK_N, bytes of BLOCK_K, SPLIT_K, num_stages, num_warps."""
MmTile = tuple[int, int, int, int, int, int]
"""BLOCK_M, BLOCK_N, bytes of BLOCK_K, num_stages, num_warps, EPILOGUE."""


@dataclass(frozen=True, slots=True)
class DotTiles:
    """Dot tiles up to one width of the token tile: what leads when n is small, and when rows alone fill the device."""

    short: Sequence[DotTile]
    tall: Sequence[DotTile]

    def ordered(self, n: int, num_sms: int) -> list[DotTile]:
        tall = n > 2 * num_sms * 64
        return list(dict.fromkeys([*self.tall, *self.short] if tall else [*self.short, *self.tall]))


def gemv_candidates(tiles: Iterable[GemvTile], shape: LinearShape, device: DeviceFacts, unit: int,
                    rows: int) -> Iterator[KernelConfig]:
    """GEMV tiles cut to the shape: a tile is no longer along k than the row, and every thread has a unit."""
    units = shape.k // unit
    seen: set[KernelConfig] = set()
    for block_n, block_k, loop, warps in tiles:
        width = min(block_k, next_pow2(units))
        if block_n * width < 32 * warps:
            continue
        config = KernelConfig.of("gemv", num_warps=warps, num_stages=max(1, loop), pdl=device.capability >= HOPPER,
                                 ROWS=rows, BLOCK_N=block_n, BLOCK_K=width, LOOP=loop)
        if config not in seen:
            seen.add(config)
            yield config


def dot_candidates(tiles: DotTiles, shape: LinearShape, device: DeviceFacts, weight_bytes: int,
                   x_bytes: int) -> Iterator[KernelConfig]:
    """Swapped tensor-core tiles that fit in shared memory, split over k where rows leave multiprocessors idle.

    Weights come by TMA where it exists, x too from 32 tokens on. Of the leading tile the other way is offered as well,
    and for small weights one that prefetches across the kernel boundary.
    """
    block_m = min(MAX_TOKENS, max(16, next_pow2(shape.m)))
    hopper = device.capability >= HOPPER
    tma = 0
    if hopper and shape.k * weight_bytes % 16 == 0:
        tma = 2 if block_m > 16 else 1
    fitting = [tile for tile in tiles.ordered(shape.n, device.num_sms)
               if _fits(tile, block_m, shape, device, weight_bytes, x_bytes)]
    for rank, (block_n, k_bytes, split_k, stages, warps) in enumerate(fitting or [(64, 32 * weight_bytes, 1, 3, 4)]):
        block_k = k_bytes // weight_bytes
        ways = [(tma, 0)]
        if rank == 0 and tma:
            ways.append((3 - tma, 0))
            if triton.cdiv(shape.n, block_n) < device.num_sms and shape.k >= 2 * split_k * block_k:
                ways.append((tma, 2 * k_bytes))
        for way, prefetch in ways:
            yield KernelConfig.of("dot", num_warps=warps, num_stages=stages, pdl=hopper, BLOCK_M=block_m,
                                  BLOCK_N=block_n, BLOCK_K=block_k, SPLIT_K=split_k, TMA=way, PREFETCH=prefetch)


def _fits(tile: DotTile, block_m: int, shape: LinearShape, device: DeviceFacts, weight_bytes: int,
          x_bytes: int) -> bool:
    """Shared memory, registers for the accumulator, and not more splits than keep the device busy."""
    block_n, k_bytes, split_k, stages, warps = tile
    block_k = k_bytes // weight_bytes
    shared = stages * block_k * (block_n * weight_bytes + block_m * x_bytes)
    programs = triton.cdiv(shape.n, block_n) * triton.cdiv(shape.m, block_m)
    if shared > device.shared_bytes - _SHARED_RESERVE or block_n * block_m > 128 * 32 * warps:
        return False
    return split_k == 1 or (programs * (split_k - 1) <= 2 * device.num_sms and shape.k >= 2 * split_k * block_k)


def mm_candidates(tiles: Iterable[MmTile], shape: LinearShape, device: DeviceFacts, element_bytes: int,
                  out_bytes: int = 2) -> Iterator[KernelConfig]:
    """Persistent tiles for many tokens; none where TMA is missing or the rows are not multiples of 16 bytes.

    The leading tile is offered with its two loops made one, too, where programs have several tiles, and last with the
    other height of the walk through L2 (the taller one won where n is large, and leads there).
    """
    if device.capability < HOPPER or shape.k * element_bytes % 16 or shape.n * out_bytes % 16:
        return
    heights = (16, 8) if shape.n > 8192 else (8, 16)
    leading: dict[str, Any] | None = None
    for block_m, block_n, k_bytes, stages, warps, epilogue in tiles:
        shared = stages * k_bytes * (block_m + block_n) + block_m * block_n * out_bytes // epilogue
        if shared > device.shared_bytes - _SHARED_RESERVE:
            continue
        config: dict[str, Any] = {
            "num_warps": warps, "num_stages": stages, "pdl": True, "BLOCK_M": block_m, "BLOCK_N": block_n,
            "BLOCK_K": k_bytes // element_bytes, "EPILOGUE": epilogue, "PROGRAMS": device.num_sms}
        yield KernelConfig.of("mm", **config, GROUP_M=heights[0])
        if leading is None:
            leading = config
            if shape.m >= _FLAT_TOKENS:
                yield KernelConfig.of("mm", **config, GROUP_M=heights[0], FLAT=1)
    if leading is not None:
        yield KernelConfig.of("mm", **leading, GROUP_M=heights[1])
