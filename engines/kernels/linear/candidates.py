"""Which launch configurations are worth timing for a shape: short lists, best guess first.

A full product of tile sizes has thousands of members and a best/worst ratio of 1.6 to 10; these lists hold what won or
came close in sweeps on one H200 (docs/kernels/linear.md), cut to what the shape and the device allow. The tuner times
what is left; the first entry is the default when nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import triton

from engines.kernels.impl import DeviceFacts, KernelConfig, LinearShape
from engines.kernels.jit import next_pow2

HOPPER = 90
MAX_TOKENS = 256  # widest token tile of the dot body
_SHARED_RESERVE = 2048  # barriers and the compiler's own scratch

GemvTile = tuple[int, int, int, int]
"""BLOCK_N, BLOCK_K (units), LOOP, num_warps."""
DotTile = tuple[int, int, int, int, int]
"""BLOCK_N, bytes of BLOCK_K, SPLIT_K, num_stages, num_warps."""
MmTile = tuple[int, int, int, int, int, int, int]
"""BLOCK_M, BLOCK_N, bytes of BLOCK_K, num_stages, num_warps, EPILOGUE, WARP_SPECIALIZE."""


def gemv_candidates(tiles: Iterable[GemvTile], shape: LinearShape, device: DeviceFacts, unit_elements: int,
                    rows: int) -> Iterator[KernelConfig]:
    """GEMV tiles cut to the shape: a tile is no longer along k than the row, and keeps two units a thread."""
    units = shape.k // unit_elements
    seen: set[KernelConfig] = set()
    for block_n, block_k, loop, warps in tiles:
        width = min(block_k, next_pow2(units))
        if block_n * width < 64 * warps or width < 8:
            continue
        config = KernelConfig.of("gemv", num_warps=warps, num_stages=max(1, loop), pdl=device.capability >= HOPPER,
                                 ROWS=rows, BLOCK_N=block_n, BLOCK_K=width, LOOP=loop)
        if config not in seen:
            seen.add(config)
            yield config


def dot_candidates(tiles: Iterable[DotTile], shape: LinearShape, device: DeviceFacts, weight_bytes: int,
                   x_bytes: int) -> Iterator[KernelConfig]:
    """Swapped tensor-core tiles: those that fit in shared memory, with as many splits as the device has idle SMs."""
    block_m = min(MAX_TOKENS, max(16, next_pow2(shape.m)))
    hopper = device.capability >= HOPPER
    tma = 1 if hopper and shape.k * weight_bytes % 16 == 0 else 0
    for block_n, k_bytes, split_k, stages, warps in tiles:
        block_k = k_bytes // weight_bytes
        shared = stages * block_k * (block_n * weight_bytes + block_m * x_bytes)
        programs = triton.cdiv(shape.n, block_n) * triton.cdiv(shape.m, block_m)
        if shared > device.shared_bytes - _SHARED_RESERVE or block_n * block_m > 128 * 32 * warps:
            continue
        if split_k > 1 and (programs * (split_k - 1) > 2 * device.num_sms or shape.k < 2 * split_k * block_k):
            continue
        yield KernelConfig.of("dot", num_warps=warps, num_stages=stages, pdl=hopper, BLOCK_M=block_m, BLOCK_N=block_n,
                              BLOCK_K=block_k, SPLIT_K=split_k, TMA=tma, PREFETCH=0)


def mm_candidates(tiles: Iterable[MmTile], shape: LinearShape, device: DeviceFacts, element_bytes: int,
                  out_bytes: int = 2) -> Iterator[KernelConfig]:
    """Persistent tiles for many tokens; none where TMA is missing or the rows are not multiples of 16 bytes."""
    if device.capability < HOPPER or shape.k * element_bytes % 16 or shape.n * out_bytes % 16:
        return
    for block_m, block_n, k_bytes, stages, warps, epilogue, specialize in tiles:
        block_k = k_bytes // element_bytes
        shared = stages * k_bytes * (block_m + block_n)
        if shared > device.shared_bytes - _SHARED_RESERVE or (specialize and device.capability != HOPPER):
            continue
        yield KernelConfig.of("mm", num_warps=warps, num_stages=stages, pdl=not specialize, BLOCK_M=block_m,
                              BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=8, EPILOGUE=epilogue,
                              TMA_STORE=0 if specialize else 1, WARP_SPECIALIZE=specialize, FLATTEN=0,
                              PROGRAMS=device.num_sms)
