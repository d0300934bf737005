"""The inner step of both attention kernels: one tile of keys through the online softmax, and the store of the result.

For a tile of queries q [R, D] and a tile of keys, in base 2 (the scores' scale carries log2(e), so exp2 is one
instruction):

    s = q k^T * scale          m' = max(m, max s)        p = 2^(s - m')
    l = l 2^(m - m') + sum p   acc = acc 2^(m - m') + p v

(m, l, acc) start at (-inf, 0, 0); the output is acc / l. A row that has seen no key keeps m = -inf without making NaN.
Keys come from the paged cache (layout: ``rope_kv`` docstring) or, BLOCK_SIZE 0, from contiguous rows [tokens, kv heads,
head_dim]. 8-bit caches are converted in registers to fp16 (exact); their scales are in ``scale`` and in the output.

**Packed codes.** The matrix unit wants pairs of keys of one column of V, and no instruction gathers bytes across rows:
left to itself the compiler fetches V from shared memory byte by byte. So decode kernels (PACKED) load codes four to an
int32 word, as they lie, widen them there, and what changes its layout is a tile of 16-bit numbers.
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
def load_tile(start, end, table_ptr, k_ptr, v_ptr, kv_head, num_kv_heads, kv_stride, dims, HEAD_DIM: tl.constexpr,
              BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, PADDED: tl.constexpr,
              PACKED: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Keys start .. start + TILE as (key, inside, k [D, TILE], v [TILE, D]); those at or beyond ``end`` are zeros if
    MASKED. ``table_ptr`` is the sequence's block table row; contiguous K and V point at the sequence's first token.
    PADDED: ``dims`` reaches beyond HEAD_DIM. PACKED: k and v are int32 [TILE, D / 4], for ``widened``."""
    key = start + tl.arange(0, TILE)
    inside = key < end
    UNIT: tl.constexpr = 4 if PACKED else 1
    if BLOCK_SIZE > 0:
        if BLOCK_SIZE % TILE == 0:  # the whole tile lies in one block: one number, and addresses that run on
            block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        elif MASKED:
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
        offset = ((block * num_kv_heads + kv_head) * (BLOCK_SIZE * HEAD_DIM // UNIT)
                  + (key % BLOCK_SIZE) * (HEAD_DIM // UNIT))
    else:
        offset = key.to(tl.int64) * kv_stride + kv_head * HEAD_DIM
    if PACKED:
        word = tl.arange(0, dims.shape[0] // 4)
        at = offset[:, None] + word[None, :]
        real = inside[:, None] & (word < HEAD_DIM // 4)[None, :]
        k = tl.load(k_ptr.to(tl.pointer_type(tl.int32)) + at, mask=real, other=0)
        v = tl.load(v_ptr.to(tl.pointer_type(tl.int32)) + at, mask=real, other=0)
    else:
        k_at = k_ptr + offset[None, :] + dims[:, None]
        v_at = v_ptr + offset[:, None] + dims[None, :]
        if PADDED:
            k = tl.load(k_at, mask=inside[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_at, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        elif MASKED:
            k = tl.load(k_at, mask=inside[None, :], other=0.0)
            v = tl.load(v_at, mask=inside[:, None], other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
    return key, inside, k, v


@triton.jit
def widened(words, CODE: tl.constexpr) -> tl.tensor:
    """int32 [R, C], four codes each, as fp16 [R, 4 C]. int8: code + 128 in the low bits of 1024, less 1152."""
    if tl.int8 == CODE:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .b32 u, m, x, y; mov.b32 m, 0x64646464; xor.b32 u, $4, 0x80808080; prmt.b32 x, u, m, 0x4140; "
            "prmt.b32 y, u, m, 0x4342; mov.b32 m, 0xE480E480; add.f16x2 x, x, m; add.f16x2 y, y, m; "
            "mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }",
            "=h,=h,=h,=h,r", [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; .reg .b32 x, y; mov.b32 {lo, hi}, $4; cvt.rn.f16x2.e4m3x2 x, lo; "
            "cvt.rn.f16x2.e4m3x2 y, hi; mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }",
            "=h,=h,=h,=h,r", [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (words.shape[0], 4 * words.shape[1]))


@triton.jit
def capped(s, scale, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Products q k^T as base-2 scores."""
    if SOFTCAP > 0:
        s = (SOFTCAP * 1.4426950408889634) * tanh(s * scale)
    else:
        s = s * scale
    return s


@triton.jit
def attend(q, m, total, acc, key, inside, k, v, last_key, scale, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
           WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, CODE: tl.constexpr
           ) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One loaded tile through the online softmax; returns the new (m, total, acc). CODE: the cache's element.

    ``last_key`` [R] is each row's own position: CAUSAL hides keys after it, WINDOW those WINDOW or more before it.
    """
    if k.dtype == tl.int32:
        s = tl.dot(q, tl.trans(widened(k, CODE)))
    else:
        s = tl.dot(q, dot_operand(k, EXACT))
    if SOFTCAP > 0:
        s = capped(s, scale, SOFTCAP)
        scale = 1.0
    if MASKED:
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= last_key[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > last_key[:, None] - WINDOW)
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    safe = m_new
    if MASKED:
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale - safe[:, None])
    old = tl.exp2(m - safe)
    total = total * old + tl.sum(p, 1)
    if v.dtype == tl.int32:
        v = widened(v, CODE)
    else:
        v = dot_operand(v, EXACT)
    acc = tl.dot(p.to(v.dtype), v, acc * old[:, None])
    return m_new, total, acc


@triton.jit
def attention_step(q, m, total, acc, start, end, last_key, table_ptr, k_ptr, v_ptr, kv_head, num_kv_heads, kv_stride,
                   dims, scale, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
                   MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                   EXACT: tl.constexpr, PACKED: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """``load_tile``, then ``attend``."""
    key, inside, k, v = load_tile(start, end, table_ptr, k_ptr, v_ptr, kv_head, num_kv_heads, kv_stride, dims, HEAD_DIM,
                                  BLOCK_SIZE, TILE, MASKED, q.shape[1] != HEAD_DIM, PACKED)
    return attend(q, m, total, acc, key, inside, k, v, last_key, scale, MASKED, CAUSAL, WINDOW, SOFTCAP, EXACT,
                  k_ptr.dtype.element_ty)


@triton.jit
def normalised(acc, total, v_scale_ptr) -> tl.tensor:
    """acc / l (zeros where nothing was seen), times v_scale."""
    scale = 1.0 / tl.where(total > 0.0, total, 1.0)
    if v_scale_ptr is not None:
        scale = scale * tl.load(v_scale_ptr)
    return acc * scale[:, None]


@triton.jit
def store_rows(y, token, head, live, dims, out_ptr, scales_ptr, input_scale_ptr, pre_quant_ptr, out_stride, num_groups,
               HEAD_DIM: tl.constexpr, QUANT: tl.constexpr, GROUP: tl.constexpr) -> None:
    """Store ``y`` [R, D], row r being ``head`` [R] of ``token`` ([R], or one number), where ``live`` [R].

    Group modes need one token, heads in sequence and a power-of-two HEAD_DIM: the rows then are one run of columns.
    """
    cols = head[:, None] * HEAD_DIM + dims[None, :]
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    if pre_quant_ptr is not None:
        y = y * tl.load(pre_quant_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if QUANT == 4 or QUANT == 5:
        SIZE: tl.constexpr = y.shape[0] * y.shape[1]
        store_act(tl.reshape(y, (SIZE,)), 0.0, token, tl.reshape(cols, (SIZE,)), tl.reshape(mask, (SIZE,)), out_ptr,
                  out_stride, scales_ptr, num_groups, input_scale_ptr, QUANT, GROUP, SIZE)
    else:
        store_act(y, 0.0, token, cols, mask, out_ptr, out_stride, scales_ptr, num_groups, input_scale_ptr, QUANT, GROUP,
                  1)
