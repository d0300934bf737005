"""The end of a decode attention: an item's sums stored, or added to those of its sequence's other items.

Of a sequence in several items each leaves a partial per row: m = running maximum, l = sum of 2^(s - m), acc = sum of
2^(s - m) v, float32 in a workspace:

    acc    [capacity, num_kv_heads, query_len * group, head_dim],   stats [.., 2] = (m, l)

They are added in the same kernel, in two steps, and always in the order of the items: whichever program of GATHER
neighbours arrives last adds theirs (a round of loads or two), and where there are more, whichever of those arrives last
adds the sums. A second kernel would cost every short context a launch (0.7 us a layer).

    counters  int32 [capacity + batch, num_kv_heads]: arrivals by the first of such neighbours, then by sequence; zero
              between launches, reset by the last to arrive
"""

from __future__ import annotations

import triton
import triton.language as tl

from engines.kernels.attention_step import normalised, store_rows
from engines.kernels.jit import arrives_last, next_pow2


@triton.jit
def _store_item(y, sequence, kv_head, row, dims, out_ptr, scales_ptr, input_scale, pre_quant_ptr, out_stride,
                num_groups, QUERY_LEN: tl.constexpr, GQA: tl.constexpr, HEAD_DIM: tl.constexpr, QUANT: tl.constexpr,
                GROUP: tl.constexpr) -> None:
    """Store ``y`` [R, D] of rows ``row`` [R] (row = token * GQA + head in group) of a (sequence, kv head)."""
    if QUERY_LEN == 1:
        token = sequence
    else:
        token = (sequence * QUERY_LEN + row // GQA)[:, None]
    store_rows(y, token, kv_head * GQA + row % GQA, row < QUERY_LEN * GQA, dims, kv_head * GQA, GQA, out_ptr,
               scales_ptr, input_scale, pre_quant_ptr, out_stride, num_groups, HEAD_DIM, QUANT, GROUP)


@triton.jit
def _leave(m, total, acc, item, kv_head, num_kv_heads, row, dims, acc_ptr, stats_ptr, LIVE: tl.constexpr,
           HEAD_DIM: tl.constexpr) -> None:
    """Store a partial in the place of ``item``."""
    slot = (item.to(tl.int64) * num_kv_heads + kv_head) * LIVE + row
    tl.store(acc_ptr + slot[:, None] * HEAD_DIM + dims[None, :], acc,
             mask=(row < LIVE)[:, None] & (dims < HEAD_DIM)[None, :])
    tl.store(stats_ptr + slot * 2, m, mask=row < LIVE)
    tl.store(stats_ptr + slot * 2 + 1, total, mask=row < LIVE)


@triton.jit
def _add_up(first, count, step, kv_head, num_kv_heads, row, dims, acc_ptr, stats_ptr, LIVE: tl.constexpr,
            HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, TOGETHER: tl.constexpr
            ) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(m, l, acc) of the partials first, first + step ... (``count`` of them), CHUNK asked for at once, and summed one
    by one or TOGETHER, as one tile."""
    m = tl.full((row.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((row.shape[0],), tl.float32)
    acc = tl.zeros((row.shape[0], dims.shape[0]), tl.float32)
    for start in range(0, count, CHUNK):
        index = start + tl.arange(0, CHUNK)
        slot = ((first + index * step).to(tl.int64)[:, None] * num_kv_heads + kv_head) * LIVE + row[None, :]
        live = (index < count)[:, None] & (row < LIVE)[None, :]
        part_m = tl.load(stats_ptr + slot * 2, mask=live, other=float("-inf"), cache_modifier=".cg")
        part_l = tl.load(stats_ptr + slot * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
        if TOGETHER:
            parts = tl.load(acc_ptr + slot[:, :, None] * HEAD_DIM + dims[None, None, :],
                            mask=live[:, :, None] & (dims < HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg")
        new_m = tl.maximum(m, tl.max(part_m, 0))
        safe = tl.where(new_m == float("-inf"), 0.0, new_m)
        old = tl.exp2(m - safe)
        weight = tl.exp2(part_m - safe[None, :])
        total = total * old + tl.sum(weight * part_l, 0)
        if TOGETHER:
            acc = acc * old[:, None] + tl.sum(weight[:, :, None] * parts, 0)
        else:
            acc *= old[:, None]
            for i in tl.static_range(CHUNK):
                own = (tl.cast(first + (start + i) * step, tl.int64) * num_kv_heads + kv_head) * LIVE + row
                known = (row < LIVE) & (start + i < count)
                own_m = tl.load(stats_ptr + own * 2, mask=known, other=float("-inf"), cache_modifier=".cg")
                part = tl.load(acc_ptr + own[:, None] * HEAD_DIM + dims[None, :],
                               mask=known[:, None] & (dims < HEAD_DIM)[None, :], other=0.0, cache_modifier=".cg")
                acc += tl.exp2(own_m - safe)[:, None] * part
        m = new_m
    return m, total, acc


@triton.jit
def finish_item(m, total, acc, item, split, splits, sequence, kv_head, row, dims, acc_ptr, stats_ptr, counter_ptr,
                v_scale, out_ptr, scales_ptr, input_scale, pre_quant_ptr, out_stride, num_groups, num_kv_heads,
                QUERY_LEN: tl.constexpr, GQA: tl.constexpr, HEAD_DIM: tl.constexpr, LIVE2: tl.constexpr,
                GATHER: tl.constexpr, CHUNK: tl.constexpr, TOGETHER: tl.constexpr, QUANT: tl.constexpr,
                GROUP: tl.constexpr) -> None:
    """The end of an item's program, whose sums are (m, total, acc) [R ...]. LIVE2 >= query_len * GQA rows are added up.
    The grid's second size is the workspace's capacity."""
    LIVE: tl.constexpr = QUERY_LEN * GQA
    if splits == 1:
        _store_item(normalised(acc, total, v_scale), sequence, kv_head, row, dims, out_ptr, scales_ptr,
                    input_scale, pre_quant_ptr, out_stride, num_groups, QUERY_LEN, GQA, HEAD_DIM, QUANT, GROUP)
    else:
        _leave(m, total, acc, item, kv_head, num_kv_heads, row, dims, acc_ptr, stats_ptr, LIVE, HEAD_DIM)
        rows = tl.arange(0, LIVE2)
        leader = item - split % GATHER
        size = tl.minimum(splits - split // GATHER * GATHER, GATHER)
        if arrives_last(counter_ptr + leader * num_kv_heads + kv_head, size):
            top, weight, sums = _add_up(leader, size, 1, kv_head, num_kv_heads, rows, dims, acc_ptr, stats_ptr, LIVE,
                                       HEAD_DIM, CHUNK, TOGETHER)
            done = splits <= GATHER
            if not done:
                _leave(top, weight, sums, leader, kv_head, num_kv_heads, rows, dims, acc_ptr, stats_ptr, LIVE, HEAD_DIM)
                leaders = (splits + GATHER - 1) // GATHER
                counter = counter_ptr + (tl.num_programs(1) + sequence) * num_kv_heads + kv_head
                done = arrives_last(counter, leaders)
                if done:
                    top, weight, sums = _add_up(item - split, leaders, GATHER, kv_head, num_kv_heads, rows, dims,
                                               acc_ptr, stats_ptr, LIVE, HEAD_DIM, CHUNK, TOGETHER)
            if done:
                _store_item(normalised(sums, weight, v_scale), sequence, kv_head, rows, dims, out_ptr, scales_ptr,
                            input_scale, pre_quant_ptr, out_stride, num_groups, QUERY_LEN, GQA, HEAD_DIM, QUANT,
                            GROUP)


def merge_options(live: int, block_d: int, num_warps: int) -> dict[str, int]:
    """GATHER, how many neighbours are added up first: 8 by one warp, 32 by more (a long context is 16 or 32 items of
    eight warps, so one level); CHUNK, how many of them are asked for at once; TOGETHER, whether they are summed as one
    tile. Several warps would meet at two barriers for each, so they do (with 32 registers a thread for it). A warp
    alone meets nobody, and one by one takes the fewest registers."""
    rows, gather = next_pow2(live) * block_d, 8 if num_warps == 1 else 32
    room = 4096 if num_warps == 1 else 1024 * num_warps
    return {"GATHER": gather, "CHUNK": max(1, min(gather, room // rows)), "TOGETHER": num_warps > 1}
