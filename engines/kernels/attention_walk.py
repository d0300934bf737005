"""How one program of decode attention walks over its keys: the cache's blocks in tiles, through the online softmax.

**One warp a program** (``attention_decode``). The rows of a tile are the few q heads of one kv head, so with several
warps each tile would cost a dozen barriers: maxima, sums and probabilities all travel between warps. Alone, a warp
meets nobody, and a multiprocessor holds enough such programs to keep the memory busy (an H200, 16 sequences of 32768
tokens, 8-bit cache: 248 us a layer, 361 with four warps; one of 1024: 3.6 us, 8.1).

**Block numbers travel ahead.** The numbers of the next tile's blocks are read while this tile is worked on and carried
into the next turn. Read where they are used, they would be a second level of indirection: Triton's pipeliner would
spend its stages on them, and each tile would wait for its numbers first.

**8-bit caches, keys first.** V lies with a block's keys adjacent (``rope_kv``), K with a key's elements adjacent: both
are then the left operand of a product with few columns, S^T = K Q^T and O^T = V^T P^T, [keys, rows] and [head_dim,
rows]. Rows are padded to 8 that way, to 16 the other way. Each block is fetched as the run of bytes that it is: one
instruction takes 512 bytes of one block. (Tiles of [head_dim, keys] take 16 bytes a block and row: 32-byte pieces at
256 keys, and 577 us where whole blocks take 250.) 16-bit caches have V as K, and rows first; so has the fused kernel
(``attention_rope``), whose warps share a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engines.kernels.attention_step import attend, block_values
from engines.kernels.impl import KernelConfig
from engines.kernels.jit import launch_options, next_pow2

_SUMS_A_WARP = 16 * 128


def padded_rows(live: int, cache: torch.Tensor) -> int:
    """Rows of a program's tile for ``live`` real ones: the matrix unit's least, or the next power of two."""
    return max(8 if cache.element_size() == 1 else 16, next_pow2(live))


def walk_options(config: KernelConfig, rows: int, block_d: int) -> dict[str, Any]:
    """``launch_options`` with the warps that ``rows`` x ``block_d`` float32 sums need: a warp holds 16 x 128 of them in
    registers, and drafted tokens or wide heads make more."""
    return launch_options(config) | {"num_warps": config.num_warps * max(1, rows * block_d // _SUMS_A_WARP)}


@triton.jit
def rows_in_place(x, k_ptr) -> tl.tensor:
    """[R, D] as ``walk`` over this cache takes it, and back: turned for 8-bit caches."""
    if k_ptr.dtype.element_ty.primitive_bitwidth == 8:
        x = tl.trans(x)
    return x


@triton.jit
def block_numbers(start, end, table, k_ptr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """The cache blocks of the tile at ``start``, 0 from ``end`` on: a number a block (or part of one) where the tile is
    made of whole ones, as 8-bit caches have it, or lies in one; else a number a key."""
    CODES: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
    EACH: tl.constexpr = min(BLOCK_SIZE, TILE) if CODES or BLOCK_SIZE >= TILE else 1
    key = start // TILE * TILE + tl.arange(0, TILE // EACH) * EACH
    return tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)


@triton.jit
def _block_keys(blocks, start, end, k_ptr, kv_head, num_kv_heads, dims, HEAD_DIM: tl.constexpr,
                BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PARTIAL: tl.constexpr) -> tl.tensor:
    """k [TILE, D] of an 8-bit cache, block by block; zeros beyond ``end`` where the tile may be PARTIAL."""
    EACH: tl.constexpr = min(BLOCK_SIZE, TILE)
    run = (blocks.to(tl.int64) * num_kv_heads + kv_head) * (BLOCK_SIZE * HEAD_DIM)
    inner = tl.arange(0, EACH)
    if BLOCK_SIZE > TILE:
        inner += start % BLOCK_SIZE
    k_at = k_ptr + run[:, None, None] + (inner * HEAD_DIM)[None, :, None] + dims[None, None, :]
    real = (dims < HEAD_DIM)[None, None, :]
    PADDED: tl.constexpr = dims.shape[0] != HEAD_DIM
    if PARTIAL:
        inside = (start + (tl.arange(0, TILE // EACH) * EACH)[:, None] + tl.arange(0, EACH)[None, :] < end)[:, :, None]
        k = tl.load(k_at, mask=inside & real if PADDED else inside, other=0.0)
    elif PADDED:
        k = tl.load(k_at, mask=real, other=0.0)
    else:
        k = tl.load(k_at)
    return tl.reshape(k, (TILE, dims.shape[0]))


@triton.jit
def _key_by_key(blocks, start, end, k_ptr, v_ptr, kv_head, num_kv_heads, dims, HEAD_DIM: tl.constexpr,
                BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PARTIAL: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(k [D, TILE], v [TILE, D]) of a 16-bit cache; zeros beyond ``end`` where the tile may be PARTIAL. ``blocks``: a
    number a key, or one where the tile lies in one block (all addresses are then that number and constants)."""
    key = start + tl.arange(0, TILE)
    run = (blocks.to(tl.int64) * num_kv_heads + kv_head) * (BLOCK_SIZE * HEAD_DIM)
    if BLOCK_SIZE == TILE:
        inner = tl.arange(0, TILE) * HEAD_DIM
    else:
        inner = key % BLOCK_SIZE * HEAD_DIM
    k_at = k_ptr + run[None, :] + (inner[None, :] + dims[:, None])
    v_at = v_ptr + run[:, None] + (inner[:, None] + dims[None, :])
    inside = key < end
    real = dims < HEAD_DIM
    PADDED: tl.constexpr = dims.shape[0] != HEAD_DIM
    if PARTIAL and PADDED:
        k = tl.load(k_at, mask=inside[None, :] & real[:, None], other=0.0)
        v = tl.load(v_at, mask=inside[:, None] & real[None, :], other=0.0)
    elif PARTIAL:
        k = tl.load(k_at, mask=inside[None, :], other=0.0)
        v = tl.load(v_at, mask=inside[:, None], other=0.0)
    elif PADDED:
        k = tl.load(k_at, mask=real[:, None], other=0.0)
        v = tl.load(v_at, mask=real[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    return k, v


@triton.jit
def load_tile_of(blocks, start, end, k_ptr, v_ptr, kv_head, num_kv_heads, dims, HEAD_DIM: tl.constexpr,
                 BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PARTIAL: tl.constexpr, KEYS_FIRST: tl.constexpr
                 ) -> tuple[tl.tensor, tl.tensor]:
    """(k, v) of the tile at ``start`` as ``attend`` takes them; KEYS_FIRST is for 8-bit caches."""
    if k_ptr.dtype.element_ty.primitive_bitwidth == 8:
        k = _block_keys(blocks, start, end, k_ptr, kv_head, num_kv_heads, dims, HEAD_DIM, BLOCK_SIZE, TILE, PARTIAL)
        v = block_values(blocks, start, end, v_ptr, kv_head, num_kv_heads, dims, HEAD_DIM, BLOCK_SIZE, TILE, PARTIAL)
        if not KEYS_FIRST:
            k = tl.trans(k)
            v = tl.trans(v)
    else:
        k, v = _key_by_key(blocks, start, end, k_ptr, v_ptr, kv_head, num_kv_heads, dims, HEAD_DIM, BLOCK_SIZE, TILE,
                           PARTIAL)
    return k, v


@triton.jit
def attend_tile(q, m, total, acc, start, end, k, v, last_key, scale, TILE: tl.constexpr, PARTIAL: tl.constexpr,
                CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, CODES: tl.constexpr,
                KEYS_FIRST: tl.constexpr, EXACT: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A loaded tile through the softmax."""
    key = start + tl.arange(0, TILE)
    return attend(q, m, total, acc, key, key < end, k, v, last_key, scale, PARTIAL or CAUSAL or WINDOW > 0,
                  PARTIAL and CODES, CAUSAL, WINDOW, SOFTCAP, KEYS_FIRST, EXACT)


@triton.jit
def last_tile(begin, end, TILE: tl.constexpr) -> tl.tensor:
    """Where the last tile of keys begin .. end starts."""
    begin = begin // TILE * TILE
    return begin + tl.maximum(end - begin - 1, 0) // TILE * TILE


@triton.jit
def walk(q, m, total, acc, begin, end, stop, last_key, table, k_ptr, v_ptr, kv_head, num_kv_heads, dims, scale,
         HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PARTIAL: tl.constexpr,
         CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KEYS_FIRST: tl.constexpr,
         EXACT: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Tiles of a context from ``begin`` (a multiple of TILE) until ``stop``, through the softmax: (m, total, acc), and
    the block numbers of the tile at ``stop``. ``end``: of the keys; only PARTIAL walks may reach it within a tile.

    ``q`` and ``acc`` are [R, D], or turned with KEYS_FIRST (``rows_in_place``).
    """
    begin = begin // TILE * TILE  # so it was cut: now the compiler knows, and codes travel in runs
    blocks = block_numbers(begin, end, table, k_ptr, BLOCK_SIZE, TILE)
    for start in tl.range(begin, stop, TILE):
        here = blocks
        blocks = block_numbers(start + TILE, end, table, k_ptr, BLOCK_SIZE, TILE)
        k, v = load_tile_of(here, start, end, k_ptr, v_ptr, kv_head, num_kv_heads, dims, HEAD_DIM, BLOCK_SIZE, TILE,
                            PARTIAL, KEYS_FIRST)
        m, total, acc = attend_tile(q, m, total, acc, start, end, k, v, last_key, scale, TILE, PARTIAL, CAUSAL, WINDOW,
                                    SOFTCAP, k_ptr.dtype.element_ty.primitive_bitwidth == 8, KEYS_FIRST, EXACT)
    return m, total, acc, blocks
