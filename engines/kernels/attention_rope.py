"""Decode attention that rotates and stores its own token: RoPE, cache write and attention of a decode step at once.

    qkv row of a sequence:  [ q heads x head_dim | k heads x head_dim | v heads x head_dim ]

``rope_kv`` and ``attention_decode`` one after the other cost a decode step of few rows 10 us a layer on an H200, most
of it waiting: a kernel boundary, then plan, block table, keys and values, each load depending on the last. Here

* what the step's own token adds never goes through memory: its key and value are taken from the qkv row, rotated in
  registers, rounded as the cache rounds them, and stand as the first entry of the online softmax. They are stored to
  the cache beside that, by the program of the context's last item;
* programs without an item bring the next weights into L2 (``read_ahead``);
* everything else that attention reads was written long before. With EARLY, plan, table, cos/sin and the item's first
  tile of keys and values are asked for *before* PDL's wait, while the qkv linear still runs. What remains after the
  wait is q, a dot, a softmax, a dot.

**When EARLY is allowed.** ``gdc_wait`` alone promises that earlier kernels are done, so reading before it needs another
promise: some kernel between the writers of plan, table and cache (the step's beginning; the step before) and this one
must let its dependents start only after its own wait (``norm.launch(fence=True)``: the norm before the qkv linear). All
kernels before that one are then complete when the qkv linear starts, and so when this one does.

**RoPE** without moving halves around, h = head_dim / 2: y[d] = x[d] cos[d mod h] + x[(d + h) mod 2h] * (-1 if d < h
else 1) * sin[d mod h]; the partner is loaded a second time. Work items, partials, merging, quantized outputs and 8-bit
caches: as in ``attention_decode``. One new token a sequence; a padded row (seq_len 0) gives zeros and stores nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engines.kernels import attention_decode, rope_kv
from engines.kernels.attention_decode import check_epilogue
from engines.kernels.attention_merge import finish_item, merge_options
from engines.kernels.attention_plan import Workspace, load_item
from engines.kernels.attention_step import capped, query_operand, score_scale
from engines.kernels.attention_walk import attend_tile, block_numbers, load_tile_of, walk
from engines.kernels.impl import KernelConfig
from engines.kernels.jit import INTERPRETED, ActQuant, gdc_launch, gdc_wait, launch_options, next_pow2, scale_at
from engines.kernels.quantize import check_act
from engines.kernels.read_ahead import ReadAhead, read_ahead
from engines.kernels.read_ahead import arguments as read_ahead_arguments
from engines.kernels.rope_kv import check_cache, to_cache, v_place


@triton.jit
def _rotated(x_ptr, dims, cos, sin, mask, HALF: tl.constexpr) -> tl.tensor:
    """A run of 2 HALF elements, rotated, in float32; ``sin`` carries the sign."""
    partner = tl.where(dims < HALF, dims + HALF, dims - HALF)
    x = tl.load(x_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + partner, mask=mask, other=0.0).to(tl.float32)
    return x * cos + y * sin


@triton.jit(do_not_specialize=["table_stride", "next_chunks", "after_chunks"],
            do_not_specialize_on_alignment=["table_ptr", "next_ptr", "after_ptr"])
def rope_decode_kernel(qkv_ptr, cos_sin_ptr, k_ptr, v_ptr, table_ptr, plan_ptr, acc_ptr, stats_ptr, counter_ptr,
                       k_scale_ptr, v_scale_ptr, out_ptr, scales_ptr, input_scale_ptr, pre_quant_ptr, next_ptr,
                       next_chunks, after_ptr, after_chunks, sm_scale, qkv_stride, table_stride, out_stride,
                       num_groups, num_kv_heads, QUERY_LEN: tl.constexpr,
                       GQA: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
                       LIVE2: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
                       SOFTCAP: tl.constexpr, GATHER: tl.constexpr, CHUNK: tl.constexpr, TOGETHER: tl.constexpr,
                       QUANT: tl.constexpr, GROUP: tl.constexpr, EXACT: tl.constexpr, AHEAD: tl.constexpr,
                       THREADS: tl.constexpr, DELAY: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr) -> None:
    """One program a (kv head, item)."""
    HALF: tl.constexpr = HEAD_DIM // 2
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    gdc_launch(PDL)
    scale = score_scale(sm_scale, k_ptr, k_scale_ptr, SOFTCAP)
    k_scale, v_scale, input_scale = scale_at(k_scale_ptr), scale_at(v_scale_ptr), scale_at(input_scale_ptr)
    if not EARLY:
        gdc_wait(PDL)
    items, sequence, begin, end, seq_len, split, splits = load_item(plan_ptr, item)
    begin = begin // TILE * TILE  # so it was cut: now the compiler knows, and 8-bit V travels in runs of keys
    mine = item < items
    if AHEAD and not mine:
        read_ahead(next_ptr, next_chunks, after_ptr, after_chunks, (item - items) * num_kv_heads + kv_head,
                   (tl.num_programs(1) - items) * num_kv_heads, THREADS, DELAY, PDL)
        return
    sequence = tl.where(mine, sequence, 0)  # a row beyond the list may name anything
    last = tl.where(mine, seq_len - 1, -1)
    cached_end = tl.minimum(end, last)
    position = tl.maximum(last, 0)
    table = table_ptr + sequence.to(tl.int64) * table_stride
    dims = tl.arange(0, BLOCK_D)
    real = dims < HEAD_DIM
    start = tl.where(mine, begin + tl.maximum(cached_end - begin - 1, 0) // TILE * TILE, 0)
    k, v = load_tile_of(block_numbers(start, cached_end, table, k_ptr, BLOCK_SIZE, TILE), start, cached_end, k_ptr,
                        v_ptr, kv_head, num_kv_heads, dims, HEAD_DIM, BLOCK_SIZE, TILE, True, False)
    angle = cos_sin_ptr + position.to(tl.int64) * HEAD_DIM + tl.where(dims < HALF, dims, dims - HALF)
    cos = tl.load(angle, mask=real, other=0.0)
    sin = tl.load(angle + HALF, mask=real, other=0.0) * tl.where(dims < HALF, -1.0, 1.0)
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    if EARLY:
        gdc_wait(PDL)
    if mine:
        row = tl.arange(0, ROWS)
        live = (row < GQA)[:, None] & real[None, :]
        heads = qkv_ptr + sequence.to(tl.int64) * qkv_stride
        q = _rotated(heads + (kv_head * GQA + row % GQA)[:, None] * HEAD_DIM, dims[None, :], cos[None, :], sin[None, :],
                     live, HALF)
        own_k = heads + (num_kv_heads * GQA + kv_head) * HEAD_DIM
        new_k = to_cache(_rotated(own_k, dims, cos, sin, real, HALF), 1.0 / k_scale, k_ptr.dtype.element_ty)
        new_v = tl.load(own_k + num_kv_heads * HEAD_DIM + dims, mask=real, other=0.0).to(tl.float32)
        new_v = to_cache(new_v, 1.0 / v_scale, v_ptr.dtype.element_ty)
        q = query_operand(q.to(qkv_ptr.dtype.element_ty), k_ptr, EXACT)
        owner = (end == seq_len) & (seq_len > 0)
        run, inner = (block * num_kv_heads + kv_head) * (BLOCK_SIZE * HEAD_DIM), position % BLOCK_SIZE
        tl.store(k_ptr + run + inner * HEAD_DIM + dims, new_k, mask=real & owner)
        tl.store(v_ptr + run + v_place(inner, dims, BLOCK_SIZE, HEAD_DIM, v_ptr.dtype.element_ty), new_v,
                 mask=real & owner)
        s = capped(tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1), scale, SOFTCAP)
        m = tl.where(owner, s, float("-inf"))
        total = tl.where(owner, tl.full((ROWS,), 1.0, tl.float32), 0.0)
        acc = tl.where(owner, tl.broadcast_to(new_v.to(tl.float32)[None, :], (ROWS, BLOCK_D)), 0.0)
        last_key = position + row * 0
        m, total, acc = attend_tile(q, m, total, acc, start, cached_end, k, v, last_key, scale, TILE, True, False,
                                    WINDOW, SOFTCAP, k_ptr.dtype.element_ty.primitive_bitwidth == 8, False, EXACT)
        m, total, acc, _ = walk(q, m, total, acc, begin, cached_end, start, last_key, table, k_ptr, v_ptr, kv_head,
                                num_kv_heads, dims, scale, HEAD_DIM, BLOCK_SIZE, TILE, False, False, WINDOW, SOFTCAP,
                                False, EXACT)
        finish_item(m, total, acc, item, split, splits, sequence, kv_head, row, dims, acc_ptr, stats_ptr, counter_ptr,
                    v_scale, out_ptr, scales_ptr, input_scale, pre_quant_ptr, out_stride, num_groups, num_kv_heads,
                    QUERY_LEN, GQA, HEAD_DIM, LIVE2, GATHER, CHUNK, TOGETHER, QUANT, GROUP)


def _check(qkv: torch.Tensor, cos_sin: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
           block_table: torch.Tensor, batch: int, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
           ) -> tuple[int, int, int, int]:
    num_kv_heads, block_size, head_dim = check_cache(k_cache, v_cache, k_scale, v_scale)
    heads, rest = divmod(qkv.shape[1], head_dim)
    num_heads = heads - 2 * num_kv_heads
    if qkv.shape[0] != batch or qkv.stride(1) != 1 or rest or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"qkv must be [{batch}, (a multiple of {num_kv_heads} + {2 * num_kv_heads}) * {head_dim}], "
                         f"found {tuple(qkv.shape)}")
    if cos_sin.shape[1] != head_dim or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
        raise ValueError(f"the whole head must be rotated: cos_sin contiguous float32 [max_pos, {head_dim}], found "
                         f"{cos_sin.dtype} {tuple(cos_sin.shape)}")
    if block_table.shape[0] != batch or block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError(f"block_table must be int32 [{batch}, blocks], found {block_table.dtype} "
                         f"{tuple(block_table.shape)}")
    return num_heads, num_kv_heads, block_size, head_dim


def launch(qkv: torch.Tensor, cos_sin: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
           block_table: torch.Tensor, work: Workspace, out: torch.Tensor, config: KernelConfig, *, sm_scale: float,
           early: bool = False, softcap: float = 0.0, k_scale: torch.Tensor | None = None,
           v_scale: torch.Tensor | None = None, pre_quant_scale: torch.Tensor | None = None,
           quant: ActQuant = ActQuant.NONE, group: int = 0, input_scale: torch.Tensor | None = None,
           scales: torch.Tensor | None = None, ahead: ReadAhead | None = None) -> torch.Tensor:
    """Fill ``out`` [batch, heads * head_dim] and the caches at each sequence's last position, for the lengths (new
    token included) that ``make_plan`` saw. Configs are ``attention_decode.candidates``'; ``early``: see the module.

    ``qkv`` [batch, (heads + 2 kv heads) * head_dim] must not share memory with ``out``. Graph safe. ValueError on a
    misfit.
    """
    num_heads, num_kv_heads, block_size, head_dim = _check(qkv, cos_sin, k_cache, v_cache, block_table, work.batch,
                                                           k_scale, v_scale)
    if work.query_len != 1:
        raise ValueError(f"one new token a sequence, the workspace is for {work.query_len}")
    check_epilogue(quant, group, head_dim, 1)
    check_act(out, qkv.shape[0], num_heads * head_dim, quant, group, input_scale, scales)
    if not work.batch:
        return out
    gqa, block_d, options = num_heads // num_kv_heads, next_pow2(head_dim), launch_options(config)
    num_groups = num_heads * head_dim // group if group else 0
    common: dict[str, Any] = {"QUERY_LEN": 1, "GQA": gqa, "HEAD_DIM": head_dim, "BLOCK_D": block_d,
                              "QUANT": int(quant), "GROUP": group}
    following, how = read_ahead_arguments(ahead, config, qkv)
    rope_decode_kernel[(num_kv_heads, work.capacity)](
        qkv, cos_sin, k_cache, v_cache, block_table, work.plan, work.acc, work.stats, work.counters, k_scale, v_scale,
        out, scales, input_scale, pre_quant_scale, *following, sm_scale, qkv.stride(0), block_table.stride(0),
        out.stride(0), num_groups, num_kv_heads, ROWS=max(16, next_pow2(gqa)), LIVE2=next_pow2(gqa),
        BLOCK_SIZE=block_size, TILE=config["TILE"], WINDOW=work.window, SOFTCAP=softcap,
        EXACT=INTERPRETED, EARLY=early and config.pdl, **merge_options(gqa, block_d, config.num_warps), **how, **common,
        **options)
    return out


def twin(qkv: torch.Tensor, cos_sin: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
         block_table: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor, *, sm_scale: float, softcap: float = 0.0,
         window: int = 0, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
         pre_quant_scale: torch.Tensor | None = None, quant: ActQuant = ActQuant.NONE, group: int = 0,
         input_scale: torch.Tensor | None = None, scales: torch.Tensor | None = None) -> torch.Tensor:
    """The same by the twins of ``rope_kv`` and ``attention_decode``."""
    num_heads, _, block_size, head_dim = _check(qkv, cos_sin, k_cache, v_cache, block_table, block_table.shape[0],
                                                k_scale, v_scale)
    position = seq_lens.long() - 1
    blocks = block_table.long().gather(1, (position.clamp(min=0) // block_size)[:, None])[:, 0]
    slots = torch.where(position >= 0, blocks * block_size + position % block_size, -1)
    q = torch.empty(qkv.shape[0], num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    rope_kv.twin(qkv, cos_sin, position.clamp(min=0), slots, q, k_cache, v_cache, k_scale=k_scale, v_scale=v_scale)
    return attention_decode.twin(q, k_cache, v_cache, block_table, seq_lens, out, sm_scale=sm_scale, softcap=softcap,
                                 window=window, k_scale=k_scale, v_scale=v_scale, pre_quant_scale=pre_quant_scale,
                                 quant=quant, group=group, input_scale=input_scale, scales=scales)
