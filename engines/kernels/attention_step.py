"""The inner step of both attention kernels: one tile of keys through the online softmax, and the store of the result.

For a tile of queries q [R, D] and a tile of keys, in base 2 (the scores' scale carries log2(e), so exp2 is one
instruction):

    s = q k^T * scale          m' = max(m, max s)        p = 2^(s - m')
    l = l 2^(m - m') + sum p   acc = acc 2^(m - m') + p v

(m, l, acc) start at (-inf, 0, 0); the output is acc / l. A row that has seen no key keeps m = -inf without making NaN.
Keys come from the paged cache (layout: ``rope_kv`` docstring) or, BLOCK_SIZE 0, from contiguous rows [tokens, kv heads,
head_dim]. 8-bit caches are converted in registers to fp16 (exact); their scales are in ``scale`` and in the output.

**Whole tiles and the last one.** A tile that reaches beyond the context needs masks on its loads and its scores, and
beyond the end of 8-bit V, which lies with a block's keys adjacent, whatever the block held before must be turned to
zeros (it is others', or nobody's: 0 * NaN is NaN). PARTIAL says that a tile may; loops over whole tiles leave all that
out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engines.kernels.jit import dot_operand, store_act, tanh


@triton.jit
def score_scale(sm_scale, k_ptr, k_scale_ptr, SOFTCAP: tl.constexpr) -> tl.tensor:
    """What q k^T is multiplied by: sm_scale * k_scale, in base 2, or as tanh's argument with a softcap."""
    scale = sm_scale
    if k_ptr.dtype.element_ty == tl.float8e4nv or k_ptr.dtype.element_ty == tl.int8:
        scale = scale * tl.load(k_scale_ptr)
    if SOFTCAP > 0:
        scale = scale / SOFTCAP
    else:
        scale = scale * 1.4426950408889634
    return scale


@triton.jit
def query_operand(q, k_ptr, EXACT: tl.constexpr) -> tl.tensor:
    """q as the dot with this cache takes it: fp16 beside 8-bit codes."""
    if k_ptr.dtype.element_ty == tl.float8e4nv or k_ptr.dtype.element_ty == tl.int8:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return dot_operand(q, EXACT)


@triton.jit
def block_values(blocks, start, end, v_ptr, kv_head, num_kv_heads, dims, HEAD_DIM: tl.constexpr,
                 BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PARTIAL: tl.constexpr) -> tl.tensor:
    """v [D, TILE] of an 8-bit cache, block by block as it lies there. ``blocks``: their numbers, one where the tile is
    part of one. PARTIAL: zeros beyond ``end``, but for up to RUN codes, which are what the block holds (masked one by
    one they would travel one by one)."""
    EACH: tl.constexpr = min(BLOCK_SIZE, TILE)
    RUN: tl.constexpr = min(EACH, 16)
    run = (blocks.to(tl.int64) * num_kv_heads + kv_head) * (BLOCK_SIZE * HEAD_DIM)
    inner = tl.arange(0, EACH)
    if BLOCK_SIZE > TILE:
        inner += start % BLOCK_SIZE
    v_at = v_ptr + run[:, None, None] + (dims * BLOCK_SIZE)[None, :, None] + inner[None, None, :]
    real = (dims < HEAD_DIM)[None, :, None]
    PADDED: tl.constexpr = dims.shape[0] != HEAD_DIM
    if PARTIAL:
        key = start + (tl.arange(0, TILE // EACH) * EACH)[:, None] + tl.arange(0, EACH)[None, :]
        near = (key // RUN * RUN < end)[:, None, :]
        v = tl.load(v_at, mask=near & real if PADDED else near, other=0.0)
    elif PADDED:
        v = tl.load(v_at, mask=real, other=0.0)
    else:
        v = tl.load(v_at)
    return tl.reshape(tl.permute(v, (1, 0, 2)), (dims.shape[0], TILE))


@triton.jit
def load_tile(start, end, table_ptr, k_ptr, v_ptr, kv_head, num_kv_heads, kv_stride, dims, HEAD_DIM: tl.constexpr,
              BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PARTIAL: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Keys start .. start + TILE, ``start`` a multiple of TILE, as (key, inside, k [D, TILE], v [TILE, D]).

    ``table_ptr`` is the sequence's block table row; contiguous K and V point at the sequence's first token. PARTIAL:
    the tile may reach beyond ``end``; what stands there is zero, but for some of v's codes (``block_values``), which
    ``attend`` clears.
    """
    TURNED: tl.constexpr = BLOCK_SIZE > 0 and v_ptr.dtype.element_ty.primitive_bitwidth == 8
    key = start + tl.arange(0, TILE)
    inside = key < end
    if BLOCK_SIZE > 0:
        if BLOCK_SIZE % TILE == 0:  # the whole tile lies in one block: one number, and addresses that run on
            block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        elif PARTIAL:
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
        offset = (block * num_kv_heads + kv_head) * (BLOCK_SIZE * HEAD_DIM) + (key % BLOCK_SIZE) * HEAD_DIM
    else:
        offset = key.to(tl.int64) * kv_stride + kv_head * HEAD_DIM
    k_at = k_ptr + offset[None, :] + dims[:, None]
    v_at = v_ptr + offset[:, None] + dims[None, :]
    k_mask = inside[None, :]
    v_mask = inside[:, None]
    PADDED: tl.constexpr = dims.shape[0] != HEAD_DIM
    if PADDED:
        k_mask = k_mask & (dims < HEAD_DIM)[:, None] if PARTIAL else (dims < HEAD_DIM)[:, None]
        v_mask = v_mask & (dims < HEAD_DIM)[None, :] if PARTIAL else (dims < HEAD_DIM)[None, :]
    if PARTIAL or PADDED:
        k = tl.load(k_at, mask=k_mask, other=0.0)
    else:
        k = tl.load(k_at)
    if TURNED:
        EACH: tl.constexpr = min(BLOCK_SIZE, TILE)
        first = start + tl.arange(0, TILE // EACH) * EACH
        blocks = tl.load(table_ptr + first // BLOCK_SIZE, mask=first < end, other=0)
        v = tl.trans(block_values(blocks, start, end, v_ptr, kv_head, num_kv_heads, dims, HEAD_DIM, BLOCK_SIZE, TILE,
                                  PARTIAL))
    elif PARTIAL or PADDED:
        v = tl.load(v_at, mask=v_mask, other=0.0)
    else:
        v = tl.load(v_at)
    return key, inside, k, v


@triton.jit
def capped(s, scale, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Products q k^T as base-2 scores."""
    if SOFTCAP > 0:
        s = (SOFTCAP * 1.4426950408889634) * tanh(s * scale)
    else:
        s = s * scale
    return s


@triton.jit
def by_key(x, KEYS_FIRST: tl.constexpr) -> tl.tensor:
    """A number a key against scores: [rows, keys], or [keys, rows] with KEYS_FIRST."""
    if KEYS_FIRST:
        r = x[:, None]
    else:
        r = x[None, :]
    return r


@triton.jit
def by_row(x, KEYS_FIRST: tl.constexpr) -> tl.tensor:
    """A number a row against scores or sums."""
    return by_key(x, not KEYS_FIRST)


@triton.jit
def attend(q, m, total, acc, key, inside, k, v, last_key, scale, MASKED: tl.constexpr, CLEAR: tl.constexpr,
           CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KEYS_FIRST: tl.constexpr,
           EXACT: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One loaded tile through the online softmax; returns the new (m, total, acc). MASKED: some keys may not be seen;
    CLEAR: what v has beyond ``inside`` is no zero yet.

    q [R, D], k [D, TILE], v [TILE, D], acc [R, D]; all of them turned with KEYS_FIRST. ``last_key`` [R] is each row's
    own position: CAUSAL hides keys after it, WINDOW those WINDOW or more before it.
    """
    KEYS: tl.constexpr = 0 if KEYS_FIRST else 1
    k = dot_operand(k, EXACT)
    if KEYS_FIRST:
        s = tl.dot(k, q)
    else:
        s = tl.dot(q, k)
    if SOFTCAP > 0:
        s = capped(s, scale, SOFTCAP)
        scale = 1.0
    if MASKED:
        seen = by_key(inside, KEYS_FIRST)
        if CAUSAL:
            seen = seen & (by_key(key, KEYS_FIRST) <= by_row(last_key, KEYS_FIRST))
        if WINDOW > 0:
            seen = seen & (by_key(key, KEYS_FIRST) > by_row(last_key, KEYS_FIRST) - WINDOW)
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, KEYS) * scale)
    safe = m_new
    if MASKED:
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale - by_row(safe, KEYS_FIRST))
    old = tl.exp2(m - safe)
    total = total * old + tl.sum(p, KEYS)
    v = dot_operand(v, EXACT)
    if CLEAR:
        v = tl.where(by_row(inside, KEYS_FIRST), v, 0.0)
    acc *= by_row(old, KEYS_FIRST)
    if KEYS_FIRST:
        acc = tl.dot(v, p.to(v.dtype), acc)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc)
    return m_new, total, acc


@triton.jit
def attention_step(q, m, total, acc, start, end, last_key, table_ptr, k_ptr, v_ptr, kv_head, num_kv_heads, kv_stride,
                   dims, scale, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
                   PARTIAL: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                   EXACT: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """``load_tile``, then ``attend``."""
    key, inside, k, v = load_tile(start, end, table_ptr, k_ptr, v_ptr, kv_head, num_kv_heads, kv_stride, dims, HEAD_DIM,
                                  BLOCK_SIZE, TILE, PARTIAL)
    return attend(q, m, total, acc, key, inside, k, v, last_key, scale, PARTIAL or CAUSAL or WINDOW > 0,
                  PARTIAL and v_ptr.dtype.element_ty.primitive_bitwidth == 8, CAUSAL, WINDOW, SOFTCAP, False,
                  EXACT)


@triton.jit
def normalised(acc, total, v_scale) -> tl.tensor:
    """acc / l (zeros where nothing was seen), times v_scale."""
    scale = 1.0 / tl.where(total > 0.0, total, 1.0) * v_scale
    return acc * scale[:, None]


@triton.jit
def store_rows(y, token, head, live, dims, first, heads, out_ptr, scales_ptr, input_scale, pre_quant_ptr, out_stride,
               num_groups, HEAD_DIM: tl.constexpr, QUANT: tl.constexpr, GROUP: tl.constexpr) -> None:
    """Store ``y`` [R, D], row r being ``head`` [R] of ``token`` ([R], or one number), where ``live`` [R].

    Group modes need one token, ``heads`` heads in sequence from ``first`` and a power-of-two HEAD_DIM: the rows then
    are one run of columns.
    """
    cols = head[:, None] * HEAD_DIM + dims[None, :]
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    if pre_quant_ptr is not None:
        y = y * tl.load(pre_quant_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if QUANT == 4 or QUANT == 5:
        SIZE: tl.constexpr = y.shape[0] * y.shape[1]
        store_act(tl.reshape(y, (SIZE,)), 0.0, token, tl.reshape(cols, (SIZE,)), tl.reshape(mask, (SIZE,)),
                  first * HEAD_DIM, (first + heads) * HEAD_DIM, out_ptr, out_stride, scales_ptr, num_groups,
                  input_scale, QUANT, GROUP, SIZE)
    else:
        store_act(y, 0.0, token, cols, mask, 0, 0, out_ptr, out_stride, scales_ptr, num_groups, input_scale, QUANT,
                  GROUP, 1)
