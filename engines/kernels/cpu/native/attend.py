"""Rotary positions, the paged cache and causal attention, for every mixture of decoding and prefill in one call.

A layer's cache is [blocks, 2 * kv_heads, block_size, head_dim], keys first, in float32, e4m3 or int8 codes: the keys
of one head in one block are one run of bytes, which the processor fetches ahead (as [slots, 2 * kv_heads, head_dim] a
decoding step of eight sequences waited 36 us a unit for 2.3 us of work).

**Attention** works in units: one sequence, one kv head, up to ``ROWS`` new tokens. The query heads that share the kv
head are rows of one matrix, so grouped queries read a key once. Per unit: scores of all keys block by block (``DOTS``),
softmax of each row over the keys that it may see, then values block by block (``FLOAT``; a cache's values are a tile
as they lie). A row's scores need head_dim and its sums the order of its blocks only. Blocks of codes become float32
numbers through a table of 256 before they are used; a head's scale of its keys multiplies scores, that of its values
outputs (``scales`` float32 [2 * kv_heads], keys first: ones for a float32 cache).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numba import njit

from engines.kernels.cpu.native import micro
from engines.kernels.cpu.native.ir import bits_of, floats, from_bits, octets, prefetch, words
from engines.kernels.cpu.native.norms import SUMS, cap_row, exp, norm_row, to_e4m3, to_int8
from engines.kernels.cpu.native.tiles import over_rows, rows_float


class Form(IntEnum):
    """What an element of a cache is."""

    FP8, FLOAT, INT8 = range(3)


#: New tokens of a unit.
ROWS = 16
_dots = over_rows(micro.DOTS)


@njit(inline="always", error_model="numpy")
def _e4m3_code(y: Any) -> Any:
    """The byte of an e4m3 number."""
    bits = bits_of(y)
    sign = (bits >> np.int32(24)) & np.int32(0x80)
    size = bits & np.int32(0x7FFFFFFF)
    normal = (size >> np.int32(20)) - np.int32(120 << 3)
    small = np.int32(from_bits(size) * np.float32(512.0))
    return sign | (small if size < np.int32(121 << 23) else normal)


@njit(nogil=True, error_model="numpy")
def _store(x: Any, slot: int, form: int, scale: Any) -> None:
    """One head's numbers into its slot."""
    n = x.size
    if form == 1:
        out = floats(slot, n)
        for i in range(n):
            out[i] = x[i]
    elif form == 0:
        codes = octets(slot, n)
        for i in range(n):
            codes[i] = np.uint8(_e4m3_code(to_e4m3(x[i] / scale)))
    else:
        codes = octets(slot, n)
        for i in range(n):
            codes[i] = np.uint8(np.int32(to_int8(x[i] / scale)) & np.int32(255))


@njit(nogil=True, error_model="numpy")
def _rotate(x: Any, y: Any, cos: Any, sin: Any) -> None:
    """y = x * C + roll(x, half) * S of one head's first dimensions (``rope_kv.py``); the rest is copied."""
    half = cos.size // 2
    for i in range(half):
        a, b = x[i], x[i + half]
        y[i] = a * cos[i] + b * sin[i]
        y[i + half] = b * cos[i + half] + a * sin[i + half]
    for i in range(cos.size, x.size):
        y[i] = x[i]


@njit(nogil=True, error_model="numpy")
def rope_kv(qkv: int, qkv_bytes: int, q: int, q_bytes: int, heads: int, kv_heads: int, dim: int, cos: int, sin: int,
            rotary: int, q_norm: int, k_norm: int, eps: float, positions: int, slots: int, cache: int,
            block_size: int, form: int, scales: int, tokens: int, rank: int, size: int) -> None:
    """Normalise (where ``q_norm`` is not 0) and rotate q (into ``q``) and k, store k and v; tokens rank, rank + size,
    ... of a step. Heads are normalised in place, in the rows of qkv."""
    element = 4 if form == 1 else 1
    scale = floats(scales, 2 * kv_heads)
    for t in range(rank, tokens, size):
        position = words(positions, tokens)[t]
        block, offset = divmod(words(slots, tokens)[t], block_size)
        slot = cache + (block * 2 * kv_heads * block_size + offset) * dim * element
        c, s = floats(cos + position * rotary * 4, rotary), floats(sin + position * rotary * 4, rotary)
        for head in range(heads + 2 * kv_heads):
            x = floats(qkv + t * qkv_bytes + head * dim * 4, dim)
            if q_norm != 0 and head < heads + kv_heads:
                norm_row(x, floats(q_norm if head < heads else k_norm, dim), eps, x)
            if head < heads:
                _rotate(x, floats(q + t * q_bytes + head * dim * 4, dim), c, s)
            else:
                where = slot + (head - heads) * block_size * dim * element
                if head < heads + kv_heads:
                    _rotate(x, x, c, s)
                _store(x, where, form, scale[head - heads])


@njit(nogil=True, error_model="numpy")
def _top(x: Any) -> Any:
    """The largest number; NaN if there is one (floats in the order of their bits)."""
    top = np.int32(-2147483648)
    for i in range(x.size):
        bits = bits_of(x[i])
        bits = bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))
        top = max(top, bits)
    return from_bits(top ^ ((top >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(nogil=True, error_model="numpy", fastmath=SUMS)
def _soften(scores: Any, scale: Any) -> Any:
    """scores -> e^((score - largest) * scale), in place; their sum."""
    top = _top(scores)
    total = np.float32(0.0)
    for i in range(scores.size):
        p = exp((scores[i] - top) * scale)
        scores[i] = p
        total += p
    return total


@njit(nogil=True, error_model="numpy")
def _widen(codes: int, pitch: int, count: int, dim: int, table: Any, out: int) -> None:
    """e4m3 codes of ``count`` slots -> float32 [count, dim]."""
    for t in range(count):
        source, y = octets(codes + t * pitch, dim), floats(out + t * dim * 4, dim)
        for i in range(dim):
            y[i] = table[source[i]]


@njit(nogil=True, error_model="numpy")
def _fetch(address: int, count: int) -> None:
    """Ask for ``count`` bytes."""
    for at in range(0, count, 64):
        prefetch(address + at)


@njit(inline="always", error_model="numpy")
def _block(cache: int, table: int, b: int, heads: int, head: int, run: int) -> int:
    """Where block b of a sequence begins for one of the 2 * kv_heads heads; a block of a head is ``run`` bytes."""
    return cache + (words(table, b + 1)[b] * heads + head) * run


@njit(nogil=True, error_model="numpy")
def _score(packed: int, scores: int, row_bytes: int, matrix: int, dim: int, start: int, seen: int, cache: int,
           heads: int, head: int, wide: bool, table: int, block_size: int, codes: int, block: int) -> None:
    """q k of ``matrix`` rows and the keys from block ``start`` to ``seen``; the next block is fetched meanwhile."""
    pitch = dim * (4 if wide else 1)
    run = block_size * pitch
    for b in range(start, (seen + block_size - 1) // block_size):
        count = min(block_size, seen - b * block_size)
        keys, step = _block(cache, table, b, heads, head, run), pitch
        if b * block_size + count < seen:
            _fetch(_block(cache, table, b + 1, heads, head, run), run)
        else:
            _fetch(_block(cache, table, start, heads, head + heads // 2, run), run)
        if not wide:
            _widen(keys, pitch, count + count % 2, dim, floats(codes, 256), block)
            keys, step = block, dim * 4
        for t in range(0, count, 2):
            _dots(keys + t * step, packed, dim * 4, scores + (b * block_size + t) * 4, row_bytes, dim // 8, step, 0,
                  matrix)


@njit(nogil=True, error_model="numpy")
def _mix(scores: int, row_bytes: int, sums: int, matrix: int, dim: int, start: int, seen: int, cache: int, heads: int,
         head: int, wide: bool, table: int, block_size: int, codes: int, block: int) -> None:
    """Adds p v of the values from block ``start`` to ``seen`` to ``sums``; the next block is fetched meanwhile."""
    pitch = dim * (4 if wide else 1)
    run = block_size * pitch
    for b in range(start, (seen + block_size - 1) // block_size):
        count = min(block_size, seen - b * block_size)
        values, step = _block(cache, table, b, heads, head, run), pitch
        if b * block_size + count < seen:
            _fetch(_block(cache, table, b + 1, heads, head, run), run)
        if not wide:
            _widen(values, pitch, count, dim, floats(codes, 256), block)
            values, step = block, dim * 4
        for tile in range(dim // 16):
            rows_float(values + 64 * tile, scores + b * block_size * 4, row_bytes, sums + 64 * tile, dim * 4, count,
                       step, 0, matrix)


@njit(nogil=True, error_model="numpy")
def attend_unit(q: int, q_bytes: int, out: int, out_bytes: int, rows: int, group: int, dim: int, before: int,
                cache: int, kv_heads: int, head: int, wide: bool, scales: int, window: int, factor: float,
                softcap: float, table: int, block_size: int, codes: int, scratch: int, longest: int) -> None:
    """One unit: ``rows`` new tokens after ``before`` seen ones; q and out point at the first token's first head.

    Scores are q k * ``factor``; with a ``softcap`` (not 0) softcap * tanh(score / softcap). With a ``window`` (not 0)
    each token sees its last ``window`` keys; blocks that no token of the unit sees are left out.
    ``scratch``: q and sums [ROWS * group, dim] each, a block of [block_size + 1, dim], scores [ROWS * group, longest].
    """
    matrix, row_bytes, seen, heads = rows * group, longest * 4, before + rows, 2 * kv_heads
    packed, sums = scratch, scratch + ROWS * group * dim * 4
    block = sums + ROWS * group * dim * 4
    scores = block + (block_size + 1) * dim * 4
    for t in range(rows):
        floats(packed + t * group * dim * 4, group * dim)[:] = floats(q + t * q_bytes, group * dim)
    floats(sums, matrix * dim)[:] = 0.0
    start = 0 if window == 0 else max(0, before + 1 - window) // block_size
    _score(packed, scores, row_bytes, matrix, dim, start, seen, cache, heads, head, wide, table, block_size, codes,
           block)
    scale = floats(scales, heads)[head] * np.float32(factor)
    for r in range(matrix):
        visible = before + r // group + 1
        first = 0 if window == 0 else max(0, visible - window)
        row = floats(scores + r * row_bytes, longest)
        if softcap == 0.0:
            total = _soften(row[first:visible], scale)
        else:
            capped = row[first:visible]
            for i in range(capped.size):
                capped[i] *= scale
            cap_row(capped, softcap, capped)
            total = _soften(capped, np.float32(1.0))
        row[start * block_size:first] = 0.0
        row[visible:seen] = 0.0
        floats(packed, matrix)[r] = floats(scales, heads)[kv_heads + head] / total
    _mix(scores, row_bytes, sums, matrix, dim, start, seen, cache, heads, kv_heads + head, wide, table, block_size,
         codes, block)
    for r in range(matrix):
        by = floats(packed, matrix)[r]
        y = floats(out + r // group * out_bytes + r % group * dim * 4, dim)
        total_row = floats(sums + r * dim * 4, dim)
        for i in range(dim):
            y[i] = total_row[i] * by


@njit(nogil=True, error_model="numpy")
def attention(q: int, q_bytes: int, out: int, out_bytes: int, heads: int, kv_heads: int, dim: int, cache: int,
              wide: bool, scales: int, window: int, factor: float, softcap: float, block_size: int, codes: int,
              sequences: int, news: int, lengths: int, tables: int, table_width: int, scratch: int, longest: int,
              rank: int, size: int) -> None:
    """All sequences of a step, one after the other in rows; units are dealt round to the team."""
    unit, start, group = 0, 0, heads // kv_heads
    for s in range(sequences):
        new, length = words(news, sequences)[s], words(lengths, sequences)[s]
        for first in range(0, new, ROWS):
            rows = min(ROWS, new - first)
            for head in range(kv_heads):
                if unit % size == rank:
                    where = head * group * dim * 4
                    at = start + first
                    attend_unit(q + at * q_bytes + where, q_bytes, out + at * out_bytes + where, out_bytes, rows, group,
                                dim, length - new + first, cache, kv_heads, head, wide, scales, window, factor,
                                softcap, tables + s * table_width * 8, block_size, codes, scratch, longest)
                unit += 1
        start += new
