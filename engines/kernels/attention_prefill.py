"""Prefill attention: many new tokens a sequence, over the paged cache or straight from the new keys and values.

Sequences of different lengths lie one after the other (varlen): ``cu_seqlens_q`` [b + 1] int32 says where each one's
new tokens begin, ``seq_lens`` [b] int32 how many keys it has in all. Its new tokens are the last ones, so query i of a
sequence sees keys 0 .. seq_len - new + i (causal with offset): chunked prefill and cached prefixes need no more.

**Tiles.** A program takes ROWS rows of one (sequence, kv head): TOKENS = ROWS // group tokens times the ``group`` q
heads that share the kv head, so K and V travel once for all of them and the diagonal waste is TOKENS wide, not ROWS.
Keys that every row sees are taken without any mask; only the last few tiles compare. Programs of late (long) tiles
start first.

**The floor is arithmetic:** 4 * tokens * keys * head_dim * heads / 2 operations (causal), 275 GFLOP a layer at 8 x
2048.

K and V are the paged cache, or rows [tokens, kv heads, head_dim] when ``block_table`` is None (whole prompts). Kernel
``rows`` (Hopper) fetches tiles of the latter by TMA: no addresses in registers, so that with ``REGISTERS`` 128 two
programs fit on a multiprocessor, and one's softmax runs under the other's matrix products.

torch's ``scaled_dot_product_attention`` is the yardstick of ``benchmarks.gpu_ops`` (cuDNN: 546 TFLOP/s at 8 x 2048 on
an H200, this kernel 402), but no candidate: cuDNN plans, and may compile, at the first call of every new shape, so a
server would stall at prompt lengths that it has not seen.

Output: bf16, or fp8 by a static scale (times ``pre_quant_scale`` [heads * head_dim] if given); other modes take
``quantize.launch`` afterwards. Cache layout: ``rope_kv`` docstring; the arithmetic: ``attention_step``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engines.kernels.attention_step import (
    attend,
    attention_step,
    normalised,
    query_operand,
    score_scale,
    store_rows,
)
from engines.kernels.attention_twin import attend_twin, gather_cache
from engines.kernels.impl import DeviceFacts, KernelConfig
from engines.kernels.jit import INTERPRETED, ActQuant, gdc_launch, gdc_wait, launch_options, next_pow2, scale_at
from engines.kernels.quantize import check_act, store_act_twin
from engines.kernels.rope_kv import check_cache


@triton.jit
def _rows_step(q, m, total, acc, start, end, last_key, k_desc, v_desc, first_row, column, scale, TILE: tl.constexpr,
               MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr
               ) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A tile of contiguous keys by bulk copy, then ``attend``."""
    key = start + tl.arange(0, TILE)
    inside = key < end
    k = k_desc.load([first_row + start, column]).T
    v = v_desc.load([first_row + start, column])
    if MASKED:  # before the scores: the registers of a tile are not enough for both at once
        v = tl.where(inside[:, None], v, 0.0)
    return attend(q, m, total, acc, key, inside, k, v, last_key, scale, MASKED, False, True, WINDOW, SOFTCAP, False,
                  EXACT)


@triton.jit(do_not_specialize=["table_stride"],
            do_not_specialize_on_alignment=["table_ptr", "cu_q_ptr", "seq_lens_ptr"])
def prefill_kernel(q_ptr, k_ptr, v_ptr, k_desc, v_desc, table_ptr, cu_q_ptr, seq_lens_ptr, k_scale_ptr, v_scale_ptr,
                   out_ptr, input_scale_ptr, pre_quant_ptr, sm_scale, table_stride, kv_stride, out_stride, num_kv_heads,
                   GQA: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
                   TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                   QUANT: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr) -> None:
    """One program a (tile of tokens, kv head, sequence). ``k_desc`` and ``v_desc``: rows by TMA."""
    TMA: tl.constexpr = k_desc is not None
    TOKENS: tl.constexpr = ROWS // GQA
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    gdc_launch(PDL)
    scale = score_scale(sm_scale, k_ptr, k_scale_ptr, SOFTCAP)
    v_scale, input_scale = scale_at(v_scale_ptr), scale_at(input_scale_ptr)
    gdc_wait(PDL)
    begin_q = tl.load(cu_q_ptr + sequence)
    new = tl.load(cu_q_ptr + sequence + 1) - begin_q
    if first < new:
        cached = tl.load(seq_lens_ptr + sequence) - new
        row = tl.arange(0, ROWS)
        dims = tl.arange(0, BLOCK_D)
        token = first + row // GQA
        live = (row < TOKENS * GQA) & (token < new)
        where = ((begin_q + token).to(tl.int64) * num_kv_heads + kv_head) * GQA + row % GQA
        q = tl.load(q_ptr + where[:, None] * HEAD_DIM + dims[None, :], mask=live[:, None] & (dims < HEAD_DIM)[None, :],
                    other=0.0)
        q = query_operand(q, k_ptr, EXACT)
        last_key = cached + token
        if BLOCK_SIZE > 0:
            table = table_ptr + sequence.to(tl.int64) * table_stride
        else:
            table = cu_q_ptr
            k_ptr += begin_q.to(tl.int64) * kv_stride
            v_ptr += begin_q.to(tl.int64) * kv_stride
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
        end = cached + tl.minimum(first + TOKENS, new)
        if WINDOW > 0:
            masked_from = tl.maximum(cached + first + 1 - WINDOW, 0) // TILE * TILE
        else:
            masked_from = (cached + first + 1) // TILE * TILE
            for start in tl.range(0, masked_from, TILE):
                if TMA:
                    m, total, acc = _rows_step(q, m, total, acc, start, end, last_key, k_desc, v_desc, begin_q,
                                               kv_head * HEAD_DIM, scale, TILE, False, WINDOW, SOFTCAP, EXACT)
                else:
                    m, total, acc = attention_step(q, m, total, acc, start, end, last_key, table, k_ptr, v_ptr,
                                                   kv_head, num_kv_heads, kv_stride, dims, scale, HEAD_DIM,
                                                   BLOCK_SIZE, TILE, False, False, WINDOW, SOFTCAP, EXACT)
        for start in tl.range(masked_from, end, TILE):
            if TMA:
                m, total, acc = _rows_step(q, m, total, acc, start, end, last_key, k_desc, v_desc, begin_q,
                                           kv_head * HEAD_DIM, scale, TILE, True, WINDOW, SOFTCAP, EXACT)
            else:
                m, total, acc = attention_step(q, m, total, acc, start, end, last_key, table, k_ptr, v_ptr, kv_head,
                                               num_kv_heads, kv_stride, dims, scale, HEAD_DIM, BLOCK_SIZE, TILE, True,
                                               True, WINDOW, SOFTCAP, EXACT)
        store_rows(normalised(acc, total, v_scale), (begin_q + token)[:, None], kv_head * GQA + row % GQA, live, dims,
                   0, 0, out_ptr, None, input_scale, pre_quant_ptr, out_stride, 0, HEAD_DIM, QUANT, 0)


def candidates(head_dim: int, gqa: int, kv_bytes: int, device: DeviceFacts) -> Sequence[KernelConfig]:
    """Tiles to try; the first is the default. Small ROWS suit short chunks; never under 16 or ``gqa``."""
    pdl = device.capability >= 90
    least = max(16, next_pow2(gqa))
    tiles: Sequence[tuple[int, int, int, int]] = (
        (128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 8, 4), (64, 64, 4, 3), (64, 128, 4, 2), (16, 64, 4, 3))
    if kv_bytes == 1:
        tiles = ((128, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (16, 64, 4, 3))
    if head_dim > 128:
        tiles = ((64, 32, 4, 2), (128, 32, 8, 2), (64, 64, 8, 2), (16, 32, 4, 2))
    found = [KernelConfig.of("tile", ROWS=max(rows, least), TILE=tile, num_warps=warps, num_stages=stages, pdl=pdl)
             for rows, tile, warps, stages in tiles
             if (max(rows, least) * 2 + stages * 2 * tile * kv_bytes) * next_pow2(head_dim) <= device.shared_bytes]
    return list(dict.fromkeys(found))


def rows_candidates(head_dim: int, gqa: int, device: DeviceFacts) -> Sequence[KernelConfig]:
    """Tiles for long whole prompts (contiguous K and V), the default first; none where there is no TMA."""
    if device.capability < 90 or head_dim not in (64, 128) or gqa > 16:
        return []
    tiles = ((128, 64, 8, 2, 128), (128, 64, 8, 3, 0), (128, 128, 8, 2, 0), (64, 64, 4, 2, 128))
    return [KernelConfig.of("rows", ROWS=rows, TILE=tile, REGISTERS=registers, num_warps=warps, num_stages=stages,
                            pdl=True) for rows, tile, warps, stages, registers in tiles]


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor | None,
           cu_seqlens_q: torch.Tensor,
           seq_lens: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, quant: ActQuant
           ) -> tuple[int, int, int]:
    if block_table is None:
        if k.dim() != 3 or k.shape != v.shape or k.shape[0] != q.shape[0] or k.stride() != v.stride() or (
                k.stride()[1:] != (k.shape[2], 1) or k_scale is not None or v_scale is not None):
            raise ValueError(f"contiguous K and V must be alike [{q.shape[0]}, kv heads, head_dim] without scales, "
                             f"found {tuple(k.shape)} and {tuple(v.shape)}")
        num_kv_heads, block_size, head_dim = k.shape[1], 0, k.shape[2]
    else:
        num_kv_heads, block_size, head_dim = check_cache(k, v, k_scale, v_scale)
        if block_table.shape[0] != seq_lens.shape[0] or block_table.dtype != torch.int32 or block_table.stride(1) != 1:
            raise ValueError(f"block_table must be int32 [{seq_lens.shape[0]}, blocks], found "
                             f"{block_table.dtype} {tuple(block_table.shape)}")
    if q.shape[2] != head_dim or q.shape[1] % num_kv_heads or not q.is_contiguous():
        raise ValueError(f"q must be contiguous [tokens, a multiple of {num_kv_heads}, {head_dim}], found "
                         f"{tuple(q.shape)}")
    if cu_seqlens_q.shape[0] != seq_lens.shape[0] + 1 or {cu_seqlens_q.dtype, seq_lens.dtype} != {torch.int32}:
        raise ValueError(f"cu_seqlens_q [b + 1] and seq_lens [b] must be int32, found {tuple(cu_seqlens_q.shape)} and "
                         f"{tuple(seq_lens.shape)}")
    if quant not in (ActQuant.NONE, ActQuant.FP8_STATIC):
        raise ValueError(f"{quant.name} needs a pass of its own here: store bf16 and use quantize.launch")
    return num_kv_heads, block_size, head_dim


def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor | None,
           cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, max_query_len: int, out: torch.Tensor,
           config: KernelConfig, *, sm_scale: float, softcap: float = 0.0, window: int = 0,
           k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
           pre_quant_scale: torch.Tensor | None = None, quant: ActQuant = ActQuant.NONE,
           input_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Fill ``out`` [tokens, heads * head_dim]. ``q`` [tokens, heads, head_dim]; K, V caches or rows (see the module).

    ``max_query_len`` (host) bounds each sequence's new tokens: it is the grid. Graph safe. ValueError on a misfit.
    """
    num_kv_heads, block_size, head_dim = _check(q, k, v, block_table, cu_seqlens_q, seq_lens, k_scale, v_scale, quant)
    tokens, num_heads = q.shape[:2]
    check_act(out, tokens, num_heads * head_dim, quant, 0, input_scale, None)
    gqa = num_heads // num_kv_heads
    per_program = config["ROWS"] // gqa
    if not per_program:
        raise ValueError(f"ROWS {config['ROWS']} is less than the {gqa} q heads of a kv head")
    options, k_desc, v_desc = launch_options(config), None, None
    if config.kernel == "rows":
        if block_table is not None or head_dim != next_pow2(head_dim) or k.stride(0) * k.element_size() % 16:
            raise ValueError(f"kernel 'rows' takes contiguous K and V and a power-of-two head_dim, found {head_dim}")
        if tokens:
            k_desc, v_desc = (TensorDescriptor(x, [tokens, num_kv_heads * head_dim], [x.stride(0), 1],
                                               [config["TILE"], head_dim]) for x in (k, v))
    if tokens:
        prefill_kernel[(triton.cdiv(max_query_len, per_program), num_kv_heads, seq_lens.shape[0])](
            q, k, v, k_desc, v_desc, block_table, cu_seqlens_q, seq_lens, k_scale, v_scale, out, input_scale,
            pre_quant_scale, sm_scale, 0 if block_table is None else block_table.stride(0),
            0 if block_size else k.stride(0), out.stride(0), num_kv_heads, GQA=gqa, HEAD_DIM=head_dim,
            BLOCK_D=next_pow2(head_dim), ROWS=config["ROWS"], TILE=config["TILE"], BLOCK_SIZE=block_size,
            WINDOW=window, SOFTCAP=softcap, QUANT=int(quant), EXACT=INTERPRETED, **options)
    return out


def twin(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor | None,
         cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, max_query_len: int, out: torch.Tensor,
         config: KernelConfig | None = None, *, sm_scale: float, softcap: float = 0.0, window: int = 0,
         k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
         pre_quant_scale: torch.Tensor | None = None, quant: ActQuant = ActQuant.NONE,
         input_scale: torch.Tensor | None = None) -> torch.Tensor:
    """The same in plain torch, float32."""
    _check(q, k, v, block_table, cu_seqlens_q, seq_lens, k_scale, v_scale, quant)
    y = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    bounds = cu_seqlens_q.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        part = slice(bounds[i], bounds[i + 1])
        if bounds[i + 1] - bounds[i] > max_query_len:
            raise ValueError(f"sequence {i} has {bounds[i + 1] - bounds[i]} new tokens, max_query_len is "
                             f"{max_query_len}")
        if block_table is None:
            keys, values = k[part].float(), v[part].float()
        else:
            keys, values = gather_cache(k, v, block_table[i], length, k_scale, v_scale)
        if bounds[i + 1] > bounds[i]:
            y[part] = attend_twin(q[part].float(), keys, values, sm_scale, softcap, window)
    flat = y.reshape(q.shape[0], -1)
    store_act_twin(flat if pre_quant_scale is None else flat * pre_quant_scale.float(), out, quant, 0, input_scale,
                   None)
    return out
