"""Decode attention over the paged KV cache, split along the context so that the whole chip works at any batch.

One query token a sequence (or ``query_len`` of them: the drafted tokens of speculative decoding) attends to its
``seq_len`` cached tokens, itself included. It is a read of the KV cache, once: 2 * seq_len * num_kv_heads * head_dim
elements a sequence; the time floor is those bytes over the memory bandwidth.

**GQA.** The q heads of one kv head form the rows of one tile ([query_len * group] padded to 16 for the matrix unit), so
K and V are read once for all of them.

**Work items.** ``attention_plan`` cuts every context into items of near-equal length, on the device. The grid is fixed
(kv heads x item capacity); programs beyond the plan's item count bring the next weights into L2 (``read_ahead``)
and return.

**Partials.** The online softmax is in base 2 (scores carry log2(e)). A sequence of one item writes acc / l straight to
the output: short contexts pay for nothing else. Otherwise its items' sums meet in ``attention_merge``.

**8-bit KV** is converted to fp16 in registers (exact); k_scale multiplies the scores, v_scale the output. V lies with a
block's keys adjacent, as the matrix unit wants them. **Output** may leave quantized: fp8 with a static scale, or groups
that divide head_dim; per-token modes take ``quantize.launch`` afterwards. seq_len 0 (a padded row) gives zeros. Cache
layout: ``rope_kv`` docstring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engines.kernels.attention_merge import finish_item, merge_options
from engines.kernels.attention_plan import Workspace, load_item
from engines.kernels.attention_step import query_operand, score_scale
from engines.kernels.attention_twin import attend_twin, gather_cache
from engines.kernels.attention_walk import (
    attend_tile,
    last_tile,
    load_tile_of,
    padded_rows,
    rows_in_place,
    walk,
    walk_options,
)
from engines.kernels.impl import DeviceFacts, KernelConfig
from engines.kernels.jit import INTERPRETED, ActQuant, gdc_launch, gdc_wait, next_pow2, scale_at
from engines.kernels.quantize import check_act, store_act_twin
from engines.kernels.read_ahead import ReadAhead, read_ahead
from engines.kernels.read_ahead import arguments as read_ahead_arguments
from engines.kernels.rope_kv import check_cache


@triton.jit(do_not_specialize=["table_stride", "next_chunks", "after_chunks"],
            do_not_specialize_on_alignment=["table_ptr", "next_ptr", "after_ptr"])
def decode_kernel(q_ptr, k_ptr, v_ptr, table_ptr, plan_ptr, acc_ptr, stats_ptr, counter_ptr, k_scale_ptr, v_scale_ptr,
                  out_ptr, scales_ptr, input_scale_ptr, pre_quant_ptr, next_ptr, next_chunks, after_ptr, after_chunks,
                  sm_scale, table_stride, out_stride, num_groups, num_kv_heads, QUERY_LEN: tl.constexpr,
                  GQA: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
                  LIVE2: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
                  SOFTCAP: tl.constexpr, CHUNK: tl.constexpr, QUANT: tl.constexpr,
                  GROUP: tl.constexpr, EXACT: tl.constexpr, AHEAD: tl.constexpr, THREADS: tl.constexpr,
                  DELAY: tl.constexpr, PDL: tl.constexpr, TAIL: tl.constexpr, GATHER: tl.constexpr,
                  TOGETHER: tl.constexpr) -> None:
    """One program a (kv head, item). LIVE2 >= query_len * GQA rows are merged, ROWS >= 16 of them are attended."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    gdc_launch(PDL)
    scale = score_scale(sm_scale, k_ptr, k_scale_ptr, SOFTCAP)
    v_scale, input_scale = scale_at(v_scale_ptr), scale_at(input_scale_ptr)
    gdc_wait(PDL)
    items, sequence, begin, end, seq_len, split, splits = load_item(plan_ptr, item)
    if AHEAD and item >= items:
        read_ahead(next_ptr, next_chunks, after_ptr, after_chunks, (item - items) * num_kv_heads + kv_head,
                   (tl.num_programs(1) - items) * num_kv_heads, THREADS, DELAY, PDL)
        return
    if item < items:
        LIVE: tl.constexpr = QUERY_LEN * GQA
        row = tl.arange(0, ROWS)
        dims = tl.arange(0, BLOCK_D)
        token = sequence.to(tl.int64) * QUERY_LEN + row // GQA
        q = tl.load(q_ptr + ((token * num_kv_heads + kv_head) * GQA + row % GQA)[:, None] * HEAD_DIM + dims[None, :],
                    mask=(row < LIVE)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        q = rows_in_place(query_operand(q, k_ptr, EXACT), k_ptr)
        last_key = seq_len - QUERY_LEN + row // GQA
        table = table_ptr + sequence.to(tl.int64) * table_stride
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = rows_in_place(tl.zeros((ROWS, BLOCK_D), tl.float32), k_ptr)
        stop = end
        if TAIL:
            stop = last_tile(begin, end, TILE)
        CODES: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
        m, total, acc, blocks = walk(q, m, total, acc, begin, end, stop, last_key, table, k_ptr, v_ptr, kv_head,
                                     num_kv_heads, dims, scale, HEAD_DIM, BLOCK_SIZE, TILE, not TAIL, QUERY_LEN > 1,
                                     WINDOW, SOFTCAP, CODES, EXACT)
        if TAIL:
            k, v = load_tile_of(blocks, stop, end, k_ptr, v_ptr, kv_head, num_kv_heads, dims, HEAD_DIM, BLOCK_SIZE,
                                TILE, True, CODES)
            m, total, acc = attend_tile(q, m, total, acc, stop, end, k, v, last_key, scale, TILE, True, QUERY_LEN > 1,
                                        WINDOW, SOFTCAP, CODES, CODES, EXACT)
        acc = rows_in_place(acc, k_ptr)
        finish_item(m, total, acc, item, split, splits, sequence, kv_head, row, dims, acc_ptr, stats_ptr, counter_ptr,
                    v_scale, out_ptr, scales_ptr, input_scale, pre_quant_ptr, out_stride, num_groups, num_kv_heads,
                    QUERY_LEN, GQA, HEAD_DIM, LIVE2, GATHER, CHUNK, TOGETHER, QUANT, GROUP)


#: The context from which ``long_candidates`` are taken where nobody has timed it.
_LONG_FROM = 2048


def _fused(sms: int, kv_bytes: int) -> list[dict[str, int]]:
    """Configs of the kernel that rotates and stores its own token: tiles shared by four or eight warps. A short
    context (up to 448 tokens by tiles of 64, 384 of 128, 256 of 256) is one item, as adding up partials costs it 5 us;
    a long one is a wave or two of programs. The last is for little shared memory."""
    narrow = [(64, 4, 3, 2 * sms), (64, 4, 3, 4 * sms)]
    wide = [(128, 8, 3), (256, 8, 2), (256, 8, 3)] if kv_bytes == 1 else [(256, 8, 2), (128, 8, 3)]
    shared = [(tile, warps, stages, target) for tile, warps, stages in wide for target in (sms, 2 * sms)]
    least = [(128, 8, 2, sms), (64, 4, 2, sms)]
    return [{"FUSED": 1, "TILE": tile, "SPLIT": 0, "TARGET": target, "MIN_SPLIT": 256, "TAIL": 1, "num_warps": warps,
             "num_stages": stages} for tile, warps, stages, target in (
                 [*narrow, *shared, *least] if kv_bytes == 1 else [*shared[:2], *narrow, *shared[2:], *least])]


def _lone(sms: int, kv_bytes: int, deterministic: bool) -> list[dict[str, int]]:
    """Configs of this kernel: one warp a program, many programs."""
    tiles = ([(32, 4, 1), (64, 4, 1), (32, 6, 1), (64, 3, 1)] if kv_bytes == 1 else
             [(16, 4, 0), (32, 3, 0), (32, 4, 0), (16, 4, 1)])
    rules = [(512, 0, 0), (256, 0, 0)] if deterministic else [(0, 4 * sms, 64), (0, 8 * sms, 128)]
    return [{"FUSED": 0, "TILE": tile, "SPLIT": split, "TARGET": target, "MIN_SPLIT": least, "TAIL": tail,
             "num_warps": 1, "num_stages": stages} for tile, stages, tail in tiles[: 1 if deterministic else None]
            for split, target, least in rules]


def _fitting(found: Sequence[dict[str, int]], block_d: int, kv_bytes: int, device: DeviceFacts) -> list[KernelConfig]:
    """Those whose tiles have room in shared memory; the last in any case."""
    room = device.shared_bytes * 3 // 4
    those = [one for one in found if max(1, one["num_stages"] - 1) * one["TILE"] * 2 * block_d * kv_bytes <= room]
    return [KernelConfig.of("split", pdl=device.capability >= 90, **one) for one in those or found[-1:]]


def _can_fuse(block_d: int) -> bool:
    """With heads of 256 the fused kernel spills."""
    return block_d <= 128


def candidates(head_dim: int, block_size: int, kv_bytes: int, device: DeviceFacts, *,
               deterministic: bool = False, batch: int = 8, fused: bool = True) -> Sequence[KernelConfig]:
    """Tiles and split rules to try for about ``batch`` sequences; the first is the default. ``kv_bytes``: of one cache
    element. Deterministic engines get one list for every batch, as a tile is part of a row's arithmetic. ``fused``: all
    layers can take the fused kernel.

    ``FUSED`` 1 means the kernel that rotates and stores its own token (``attention_rope``). Up to four sequences it
    wins by latency (an H200, fp8, 8-bit cache: one short context 2.48 ms a step, 2.60 with one warp a program), unless
    their contexts are long (``long_candidates``); from eight on it wins nothing (2.70 and 2.68; 16 x 8192: 8.3 and
    5.1). ``TAIL`` 1: a context's last tile has code of its own, and the loop over whole tiles is shorter; it has to
    wait for memory once more, though.
    """
    if block_size != next_pow2(block_size):
        raise ValueError(f"block_size must be a power of two, found {block_size}")
    sms, block_d = max(1, device.num_sms), next_pow2(head_dim)
    few = fused and batch <= 4 and _can_fuse(block_d) and not deterministic
    return _fitting(_fused(sms, kv_bytes) if few else _lone(sms, kv_bytes, deterministic), block_d, kv_bytes, device)


def long_candidates(head_dim: int, kv_bytes: int, device: DeviceFacts) -> Sequence[KernelConfig]:
    """The same for up to four sequences of which one has FROM tokens or more; such steps have graphs of their own.

    Reading takes longer than beginning there, and one warp a program reads fastest (an H200, four layers of a step, fp8
    cache, one sequence of 160, 8192 and 32768 tokens: 285, 317 and 376 us; the fused kernel 275, 323 and 421 with eight
    warps, 275, 320 and 392 with four). Empty where the fused kernel is never taken.
    """
    sms, block_d = max(1, device.num_sms), next_pow2(head_dim)
    if not _can_fuse(block_d):
        return []
    found = [*_lone(sms, kv_bytes, False), *_fused(sms, kv_bytes)[:4]]
    return _fitting([one | {"FROM": _LONG_FROM} for one in found], block_d, kv_bytes, device)


def check_epilogue(quant: ActQuant, group: int, head_dim: int, query_len: int) -> None:
    """ValueError for quantized outputs that no single program can make."""
    if quant.per_token:
        raise ValueError(f"{quant.name} needs the whole row: store bf16 here and use quantize.launch")
    if group and (head_dim % group or query_len != 1 or head_dim != next_pow2(head_dim)):
        raise ValueError("Group modes here need groups that divide a power-of-two head_dim and query_len 1, found "
                         f"group {group}, head_dim {head_dim}, query_len {query_len}: store bf16, then "
                         "quantize.launch")


def _check(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, out: torch.Tensor,
           batch: int, query_len: int, quant: ActQuant, group: int, k_scale: torch.Tensor | None,
           v_scale: torch.Tensor | None) -> tuple[int, int, int, int]:
    num_kv_heads, block_size, head_dim = check_cache(k_cache, v_cache, k_scale, v_scale)
    num_heads = q.shape[1]
    if q.shape != (batch * query_len, num_heads, head_dim) or not q.is_contiguous() or num_heads % num_kv_heads:
        raise ValueError(f"q must be contiguous [{batch * query_len}, a multiple of {num_kv_heads}, {head_dim}], found "
                         f"{tuple(q.shape)}")
    if block_table.shape[0] != batch or block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError(f"block_table must be int32 [{batch}, blocks], found {block_table.dtype} "
                         f"{tuple(block_table.shape)}")
    check_epilogue(quant, group, head_dim, query_len)
    return num_heads, num_kv_heads, block_size, head_dim


def launch(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, work: Workspace,
           out: torch.Tensor, config: KernelConfig, *, sm_scale: float, softcap: float = 0.0,
           k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
           pre_quant_scale: torch.Tensor | None = None, quant: ActQuant = ActQuant.NONE, group: int = 0,
           input_scale: torch.Tensor | None = None, scales: torch.Tensor | None = None, ahead: ReadAhead | None = None
           ) -> torch.Tensor:
    """Fill ``out`` [batch * query_len, num_heads * head_dim] for the lengths that ``make_plan`` saw.

    ``q`` [batch * query_len, num_heads, head_dim], tokens of a sequence adjacent; ``block_table`` [batch, blocks]
    int32. Graph safe. Raises ValueError on a misfit.
    """
    num_heads, num_kv_heads, block_size, head_dim = _check(
        q, k_cache, v_cache, block_table, out, work.batch, work.query_len, quant, group, k_scale, v_scale)
    check_act(out, q.shape[0], num_heads * head_dim, quant, group, input_scale, scales)
    if not work.batch:
        return out
    gqa, block_d = num_heads // num_kv_heads, next_pow2(head_dim)
    live = work.query_len * gqa
    rows = padded_rows(live, k_cache)
    options = walk_options(config, rows, block_d)
    num_groups = num_heads * head_dim // group if group else 0
    common = {"QUERY_LEN": work.query_len, "GQA": gqa, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "QUANT": int(quant),
              "GROUP": group}
    following, how = read_ahead_arguments(ahead, config, q)
    decode_kernel[(num_kv_heads, work.capacity)](
        q, k_cache, v_cache, block_table, work.plan, work.acc, work.stats, work.counters, k_scale, v_scale, out, scales,
        input_scale, pre_quant_scale, *following, sm_scale, block_table.stride(0), out.stride(0), num_groups,
        num_kv_heads, **how, ROWS=rows, LIVE2=next_pow2(live), BLOCK_SIZE=block_size, TILE=config["TILE"],
        WINDOW=work.window, SOFTCAP=softcap, EXACT=INTERPRETED, TAIL=bool(k_scale is not None or config.get("TAIL")),
        **merge_options(live, block_d, options["num_warps"]), **common, **options)
    return out


def twin(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
         seq_lens: torch.Tensor, out: torch.Tensor, config: KernelConfig | None = None, *, sm_scale: float,
         softcap: float = 0.0, window: int = 0, query_len: int = 1, k_scale: torch.Tensor | None = None,
         v_scale: torch.Tensor | None = None, pre_quant_scale: torch.Tensor | None = None,
         quant: ActQuant = ActQuant.NONE, group: int = 0, input_scale: torch.Tensor | None = None,
         scales: torch.Tensor | None = None) -> torch.Tensor:
    """The same in plain torch, float32; takes ``seq_lens`` (and window, query_len) where the kernel takes the plan."""
    _check(q, k_cache, v_cache, block_table, out, block_table.shape[0], query_len, quant, group, k_scale, v_scale)
    y = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for i, length in enumerate(seq_lens.tolist()):
        if length:
            rows = slice(i * query_len, (i + 1) * query_len)
            k, v = gather_cache(k_cache, v_cache, block_table[i], length, k_scale, v_scale)
            y[rows] = attend_twin(q[rows].float(), k, v, sm_scale, softcap, window)
    flat = y.reshape(q.shape[0], -1)
    store_act_twin(flat if pre_quant_scale is None else flat * pre_quant_scale.float(), out, quant, group, input_scale,
                   scales)
    return out
