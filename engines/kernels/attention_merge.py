"""The end of a decode attention: partials of a sequence's items added in their order, normalised, and stored.

Layout of the partials and why their order never changes: ``attention_decode``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from engines.kernels.attention_plan import Workspace
from engines.kernels.attention_step import normalised, store_rows
from engines.kernels.jit import gdc_launch, gdc_wait, next_pow2


@triton.jit
def store_item(y, sequence, kv_head, row, dims, out_ptr, scales_ptr, input_scale_ptr, pre_quant_ptr, out_stride,
               num_groups, QUERY_LEN: tl.constexpr, GQA: tl.constexpr, HEAD_DIM: tl.constexpr, QUANT: tl.constexpr,
               GROUP: tl.constexpr) -> None:
    """Store ``y`` [R, D] of rows ``row`` [R] (row = token * GQA + head in group) of a (sequence, kv head)."""
    if QUERY_LEN == 1:
        token = sequence
    else:
        token = (sequence * QUERY_LEN + row // GQA)[:, None]
    store_rows(y, token, kv_head * GQA + row % GQA, row < QUERY_LEN * GQA, dims, out_ptr, scales_ptr, input_scale_ptr,
               pre_quant_ptr, out_stride, num_groups, HEAD_DIM, QUANT, GROUP)


@triton.jit
def merge(first, splits, sequence, kv_head, row, dims, acc_ptr, stats_ptr, v_scale_ptr, out_ptr, scales_ptr,
          input_scale_ptr, pre_quant_ptr, out_stride, num_groups, num_kv_heads, QUERY_LEN: tl.constexpr,
          GQA: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, QUANT: tl.constexpr, GROUP: tl.constexpr
          ) -> None:
    """Add the partials of rows ``row`` [R] over items first .. first + splits, and store.

    First all maxima and sums at once; with the final maximum known the accumulators are one chain of multiply-adds
    whose loads, CHUNK at a time, wait for nothing and cross no threads.
    """
    LIVE: tl.constexpr = QUERY_LEN * GQA
    top = tl.full((row.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((row.shape[0],), tl.float32)
    for start in range(0, splits, 32):
        split = start + tl.arange(0, 32)
        slot = ((first + split).to(tl.int64)[:, None] * num_kv_heads + kv_head) * LIVE + row[None, :]
        live = (split < splits)[:, None] & (row < LIVE)[None, :]
        m = tl.load(stats_ptr + slot * 2, mask=live, other=float("-inf"), cache_modifier=".cg")
        part_l = tl.load(stats_ptr + slot * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(m, 0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(m - safe[None, :]) * part_l, 0)
        top = new_top
    top = tl.where(top == float("-inf"), 0.0, top)
    acc = tl.zeros((row.shape[0], dims.shape[0]), tl.float32)
    for start in range(0, splits, CHUNK):
        for i in tl.static_range(CHUNK):
            live = (row < LIVE) & (start + i < splits)
            slot = (tl.cast(first + start + i, tl.int64) * num_kv_heads + kv_head) * LIVE + row
            m = tl.load(stats_ptr + slot * 2, mask=live, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(acc_ptr + slot[:, None] * HEAD_DIM + dims[None, :],
                           mask=live[:, None] & (dims < HEAD_DIM)[None, :], other=0.0, cache_modifier=".cg")
            acc += tl.exp2(m - top)[:, None] * part
    store_item(normalised(acc, total, v_scale_ptr), sequence, kv_head, row, dims, out_ptr, scales_ptr, input_scale_ptr,
               pre_quant_ptr, out_stride, num_groups, QUERY_LEN, GQA, HEAD_DIM, QUANT, GROUP)


@triton.jit(do_not_specialize=["capacity"])
def merge_kernel(plan_ptr, acc_ptr, stats_ptr, v_scale_ptr, out_ptr, scales_ptr, input_scale_ptr, pre_quant_ptr,
                 capacity, out_stride, num_groups, num_kv_heads, QUERY_LEN: tl.constexpr, GQA: tl.constexpr,
                 HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
                 QUANT: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr
                 ) -> None:
    """One program a (row of a kv head, kv head, sequence); those of one item have nothing to do."""
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    gdc_launch(PDL)
    gdc_wait(PDL)
    own = plan_ptr + (1 + capacity + sequence) * 8
    first = tl.load(own)
    splits = tl.load(own + 1)
    if splits > 1:
        row = tl.program_id(0) + tl.arange(0, 1)
        merge(first, splits, sequence, kv_head, row, tl.arange(0, BLOCK_D), acc_ptr, stats_ptr, v_scale_ptr, out_ptr,
               scales_ptr, input_scale_ptr, pre_quant_ptr, out_stride, num_groups, num_kv_heads, QUERY_LEN, GQA,
               HEAD_DIM, CHUNK, QUANT, GROUP)


def launch_merge(work: Workspace, num_kv_heads: int, live: int, v_scale: torch.Tensor | None, out: torch.Tensor,
                 scales: torch.Tensor | None, input_scale: torch.Tensor | None, pre_quant_scale: torch.Tensor | None,
                 num_groups: int, common: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """The second kernel of ``MERGE`` 0: add up the partials of sequences that were split."""
    merge_kernel[(live, num_kv_heads, work.batch)](
        work.plan, work.acc, work.stats, v_scale, out, scales, input_scale, pre_quant_scale, work.capacity,
        out.stride(0), num_groups, num_kv_heads, CHUNK=16, **common, **(dict(options) | {"num_stages": 1,
                                                                                       "num_warps": 1}))


def merge_chunk(live: int, block_d: int, num_warps: int) -> int:
    """How many partials the last program of a sequence asks for at once: 64 registers a thread."""
    return max(1, min(16, 2048 * num_warps // (next_pow2(live) * block_d)))
