"""How one program of decode attention walks over its keys: the cache's blocks in tiles, through the online softmax.

**Warps that do not meet.** The rows of a tile are the few q heads of one kv head, so warps that share a tile cost it a
dozen barriers: maxima, sums and probabilities all travel between them. So either a program is one warp, and a
multiprocessor holds enough of them to keep the memory busy (an H200, 16 sequences of 32768 tokens, 8-bit cache: 248 us
a layer, 361 with four warps on a tile), or each of its warps is a *lane* with keys and an online softmax of its own, a
leading dimension of every tensor here, and lanes are added up once, at the end. LANES 0: no lanes (one warp; or more
rows than one holds, see ``walk_options``).

**Block numbers travel ahead.** The numbers of the next tile's blocks are read while this tile is worked on and carried
into the next turn. Read where they are used, they would be a second level of indirection: Triton's pipeliner would
spend its stages on them, and each tile would wait for its numbers first.

**8-bit caches, keys first.** V lies with a block's keys adjacent (``rope_kv``), K with a key's elements adjacent: both
are then the left operand of a product with few columns, S^T = K Q^T and O^T = V^T P^T, [keys, rows] and [head_dim,
rows]. Rows are padded to 8 that way, to 16 the other way. Each block is fetched as the run of bytes that it is: one
instruction takes 512 bytes of one block. (Tiles of [head_dim, keys] take 16 bytes a block and row: 32-byte pieces at
256 keys, and 577 us where whole blocks take 250.) 16-bit caches have V as K, and rows first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engines.kernels.attention_step import attend, by_key, by_row
from engines.kernels.impl import KernelConfig
from engines.kernels.jit import launch_options, next_pow2

_SUMS_A_WARP = 16 * 128


def padded_rows(live: int, cache: torch.Tensor) -> int:
    """Rows of a program's tile for ``live`` real ones: the matrix unit's least, or the next power of two."""
    return max(8 if cache.element_size() == 1 else 16, next_pow2(live))


def walk_options(config: KernelConfig, rows: int, block_d: int) -> dict[str, Any]:
    """``launch_options`` and LANES. A warp holds 16 x 128 float32 sums in registers; where drafted tokens or wide heads
    make more, more warps share a tile."""
    options, share = launch_options(config), max(1, rows * block_d // _SUMS_A_WARP)
    lanes = config.num_warps if config.num_warps > 1 and share == 1 else 0
    return options | {"LANES": lanes, "num_warps": min(8, config.num_warps * share)}


@triton.jit
def rows_in_place(x, k_ptr) -> tl.tensor:
    """[R, D] as ``walk`` over this cache takes it, and back: turned for 8-bit caches."""
    if k_ptr.dtype.element_ty.primitive_bitwidth == 8:
        x = tl.trans(x)
    return x


@triton.jit
def to_lanes(q, m, total, acc, LANES: tl.constexpr) -> tuple[tl.tensor, ...]:
    """What a program begins with, a lane at a time: q in each, the sums in the first."""
    if LANES:
        first = tl.arange(0, LANES) == 0
        q = tl.broadcast_to(q[None, :, :], (LANES, q.shape[0], q.shape[1]))
        m = tl.where(first[:, None], m[None, :], float("-inf"))
        total = tl.where(first[:, None], total[None, :], 0.0)
        acc = tl.where(first[:, None, None], acc[None, :, :], 0.0)
    return q, m, total, acc


@triton.jit
def join_lanes(m, total, acc, k_ptr, LANES: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(m, total [R], acc [R, D]) of all lanes together."""
    if LANES:
        top = tl.max(m, 0)
        part = tl.exp2(m - tl.where(top == float("-inf"), 0.0, top)[None, :])
        total = tl.sum(total * part, 0)
        acc = tl.sum(acc * by_row(part, k_ptr.dtype.element_ty.primitive_bitwidth == 8, LANES), 0)
        m = top
    return m, total, rows_in_place(acc, k_ptr)


@triton.jit
def _keys(start, TILE: tl.constexpr, LANES: tl.constexpr) -> tl.tensor:
    """Keys of the tile at ``start``: [TILE], or [LANES, TILE // LANES]."""
    if LANES:
        r = start + (tl.arange(0, LANES) * (TILE // LANES))[:, None] + tl.arange(0, TILE // LANES)[None, :]
    else:
        r = start + tl.arange(0, TILE)
    return r


@triton.jit
def block_numbers(start, end, table, k_ptr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr
                  ) -> tl.tensor:
    """The cache blocks of the tile at ``start``, 0 from ``end`` on: a number for EACH so many keys that lie in one
    block, which is all keys of a block (or of a lane) for 8-bit caches, and where a lane is no longer than a block."""
    LANE: tl.constexpr = TILE // max(1, LANES)
    CODES: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
    EACH: tl.constexpr = min(BLOCK_SIZE, LANE) if CODES or BLOCK_SIZE >= LANE else 1
    key = start // TILE * TILE + tl.arange(0, TILE // EACH) * EACH
    return tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)


@triton.jit
def _whole_blocks(blocks, start, end, k_ptr, v_ptr, kv_head, num_kv_heads, dims, HEAD_DIM: tl.constexpr,
                  BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, PARTIAL: tl.constexpr
                  ) -> tuple[tl.tensor, tl.tensor]:
    """(k [TILE, D], v [D, TILE]) of an 8-bit cache, or of each lane. PARTIAL: zeros beyond ``end``, but up to RUN codes
    of v, which are what the block holds (masked one by one they would travel one by one)."""
    LANE: tl.constexpr = TILE // max(1, LANES)
    EACH: tl.constexpr = min(BLOCK_SIZE, LANE)
    RUN: tl.constexpr = min(EACH, 16)
    D: tl.constexpr = dims.shape[0]
    piece = tl.arange(0, TILE // EACH) * EACH
    inner = tl.arange(0, EACH)
    run = (blocks.to(tl.int64) * num_kv_heads + kv_head) * (BLOCK_SIZE * HEAD_DIM)
    k_run = run
    v_run = run
    if BLOCK_SIZE > EACH:
        k_run += (start + piece) % BLOCK_SIZE * HEAD_DIM
        v_run += (start + piece) % BLOCK_SIZE
    k_at = k_ptr + k_run[:, None, None] + (inner * HEAD_DIM)[None, :, None] + dims[None, None, :]
    v_at = v_ptr + v_run[:, None, None] + (dims * BLOCK_SIZE)[None, :, None] + inner[None, None, :]
    real = dims < HEAD_DIM
    PADDED: tl.constexpr = D != HEAD_DIM
    if PARTIAL:
        key = start + piece[:, None] + inner[None, :]
        inside = (key < end)[:, :, None]
        near = (key // RUN * RUN < end)[:, None, :]
        k = tl.load(k_at, mask=inside & real[None, None, :] if PADDED else inside, other=0.0)
        v = tl.load(v_at, mask=near & real[None, :, None] if PADDED else near, other=0.0)
    elif PADDED:
        k = tl.load(k_at, mask=real[None, None, :], other=0.0)
        v = tl.load(v_at, mask=real[None, :, None], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    if LANES:
        k = tl.reshape(k, (LANES, LANE, D))
        v = tl.reshape(tl.permute(tl.reshape(v, (LANES, LANE // EACH, D, EACH)), (0, 2, 1, 3)), (LANES, D, LANE))
    else:
        k = tl.reshape(k, (TILE, D))
        v = tl.reshape(tl.permute(v, (1, 0, 2)), (D, TILE))
    return k, v


@triton.jit
def _key_by_key(blocks, start, end, k_ptr, v_ptr, kv_head, num_kv_heads, dims, HEAD_DIM: tl.constexpr,
                BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, PARTIAL: tl.constexpr
                ) -> tuple[tl.tensor, tl.tensor]:
    """(k [D, TILE], v [TILE, D]) of a 16-bit cache, or of each lane; zeros beyond ``end`` where it may be PARTIAL.
    Where a lane lies in one block, all its addresses are that block's and constants."""
    LANE: tl.constexpr = TILE // max(1, LANES)
    key = _keys(start, TILE, LANES)
    if LANES:  # before the multiplication: alignment is not seen through a change of shape
        blocks = tl.reshape(blocks, (LANES, 1 if BLOCK_SIZE >= LANE else LANE))
    run = (blocks.to(tl.int64) * num_kv_heads + kv_head) * (BLOCK_SIZE * HEAD_DIM)
    if BLOCK_SIZE == LANE:
        inner = _keys(0, TILE, LANES) % BLOCK_SIZE * HEAD_DIM
    else:
        inner = key % BLOCK_SIZE * HEAD_DIM
    k_at = k_ptr + by_key(run, False, LANES) + (by_key(inner, False, LANES) + dims[:, None])
    v_at = v_ptr + by_key(run, True, LANES) + (by_key(inner, True, LANES) + dims[None, :])
    k_inside = by_key(key < end, False, LANES)
    v_inside = by_key(key < end, True, LANES)
    real = dims < HEAD_DIM
    PADDED: tl.constexpr = dims.shape[0] != HEAD_DIM
    if PARTIAL and PADDED:
        k = tl.load(k_at, mask=k_inside & real[:, None], other=0.0)
        v = tl.load(v_at, mask=v_inside & real[None, :], other=0.0)
    elif PARTIAL:
        k = tl.load(k_at, mask=k_inside, other=0.0)
        v = tl.load(v_at, mask=v_inside, other=0.0)
    elif PADDED:
        k = tl.load(k_at, mask=real[:, None], other=0.0)
        v = tl.load(v_at, mask=real[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    return k, v


@triton.jit
def load_tile_of(blocks, start, end, k_ptr, v_ptr, kv_head, num_kv_heads, dims, HEAD_DIM: tl.constexpr,
                 BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, PARTIAL: tl.constexpr
                 ) -> tuple[tl.tensor, tl.tensor]:
    """(k, v) of the tile at ``start`` as ``attend`` takes them."""
    if k_ptr.dtype.element_ty.primitive_bitwidth == 8:
        k, v = _whole_blocks(blocks, start, end, k_ptr, v_ptr, kv_head, num_kv_heads, dims, HEAD_DIM, BLOCK_SIZE, TILE,
                             LANES, PARTIAL)
    else:
        k, v = _key_by_key(blocks, start, end, k_ptr, v_ptr, kv_head, num_kv_heads, dims, HEAD_DIM, BLOCK_SIZE, TILE,
                           LANES, PARTIAL)
    return k, v


@triton.jit
def attend_tile(q, m, total, acc, start, end, k, v, last_key, scale, TILE: tl.constexpr, LANES: tl.constexpr,
                PARTIAL: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                CODES: tl.constexpr, EXACT: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A loaded tile through the softmax. ``last_key`` [R]."""
    key = _keys(start, TILE, LANES)
    if LANES:
        last_key = last_key[None, :]
    return attend(q, m, total, acc, key, key < end, k, v, last_key, scale, PARTIAL or CAUSAL or WINDOW > 0,
                  PARTIAL and CODES, CAUSAL, WINDOW, SOFTCAP, CODES, LANES, EXACT)


@triton.jit
def last_tile(begin, end, TILE: tl.constexpr) -> tl.tensor:
    """Where the last tile of keys begin .. end starts."""
    begin = begin // TILE * TILE
    return begin + tl.maximum(end - begin - 1, 0) // TILE * TILE


@triton.jit
def walk(q, m, total, acc, begin, end, stop, blocks, last_key, table, k_ptr, v_ptr, kv_head, num_kv_heads, dims, scale,
         HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
         PARTIAL: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr
         ) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Tiles of a context from ``begin`` (a multiple of TILE) until ``stop``, through the softmax: (m, total, acc), and
    the block numbers of the tile at ``stop``. ``end``: of the keys; only PARTIAL walks may reach it within a tile.

    ``q`` and ``acc`` [R, D] lie as ``rows_in_place`` and ``to_lanes`` put them; ``blocks``: those of ``begin``.
    """
    begin = begin // TILE * TILE  # so it was cut: now the compiler knows, and codes travel in runs
    for start in tl.range(begin, stop, TILE):
        here = blocks
        blocks = block_numbers(start + TILE, end, table, k_ptr, BLOCK_SIZE, TILE, LANES)
        k, v = load_tile_of(here, start, end, k_ptr, v_ptr, kv_head, num_kv_heads, dims, HEAD_DIM, BLOCK_SIZE, TILE,
                            LANES, PARTIAL)
        m, total, acc = attend_tile(q, m, total, acc, start, end, k, v, last_key, scale, TILE, LANES, PARTIAL, CAUSAL,
                                    WINDOW, SOFTCAP, k_ptr.dtype.element_ty.primitive_bitwidth == 8, EXACT)
    return m, total, acc, blocks


@triton.jit
def _ask(pointers, wanted, BYTES: tl.constexpr) -> None:
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.b32 $0, 0; }",
        "=r,l,r,n", [pointers, wanted.to(tl.int32), BYTES], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def ask_for_blocks(begin, end, table, k_ptr, v_ptr, kv_head, num_kv_heads, HEAD_DIM: tl.constexpr,
                   BLOCK_SIZE: tl.constexpr) -> None:
    """Bring keys and values of the four blocks from ``begin`` on into L2: no register holds them, nothing waits. (Of
    long contexts all programs together would ask for more than L2 holds.)"""
    BYTES: tl.constexpr = BLOCK_SIZE * HEAD_DIM * k_ptr.dtype.element_ty.primitive_bitwidth // 8
    key = begin // BLOCK_SIZE * BLOCK_SIZE + tl.arange(0, 4) * BLOCK_SIZE
    wanted = key < end
    block = tl.load(table + key // BLOCK_SIZE, mask=wanted, other=0).to(tl.int64)
    run = (block * num_kv_heads + kv_head) * BYTES
    _ask(k_ptr.to(tl.int64) + run, wanted, BYTES)
    _ask(v_ptr.to(tl.int64) + run, wanted, BYTES)
