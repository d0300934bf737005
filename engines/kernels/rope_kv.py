"""From the fused qkv row to rotated queries and the paged KV cache, in one kernel.

    qkv row t:  [ q heads x head_dim | k heads x head_dim | v heads x head_dim ]  (+ bias)

Per head, in float32: add ``bias``; for q and k heads the optional RMSNorm over head_dim (Qwen3's qk-norm) and RoPE;
then q goes to ``q_out`` [t, q heads, head_dim] contiguous and k, v into the cache at ``slot_mapping[t]``.

**RoPE** in the half-split ("neox", Hugging Face) form over the first ``rotary_dim`` of head_dim, pairs (i, i + half):

    y[i]        = x[i] * cos[i] - x[i + half] * sin[i]
    y[i + half] = x[i + half] * cos[i] + x[i] * sin[i]

``cos_sin`` [max_pos, rotary_dim] float32 holds cos in the first half of a row and sin in the second; every scaling
scheme (linear, llama3, yarn with its factor) is already in that table. Dims beyond rotary_dim pass through.

**KV cache layout** (K and V each their own tensor, shared with both attention kernels):

    [num_blocks, num_kv_heads, block_size, head_dim]

so that one (block, head) is a contiguous run of block_size * head_dim elements (4 KiB at 16 x 128 bf16): an attention
program streams whole runs and never touches another head. A slot is block * block_size + offset; slot -1 is padding
and stores nothing to the cache. Offsets are int64, pools may pass 2**31 elements.

**Cache dtypes**: bf16/fp16/fp32 as they are; fp8_e4m3 stores x / k_scale saturated at 448; int8 stores
round(x / k_scale) in [-127, 127]. ``k_scale`` and ``v_scale`` are [] float32 on the device. **V of 8-bit caches is
turned**: [num_blocks, num_kv_heads, head_dim, block_size]. Attention multiplies by pairs of keys of one column of V; no
instruction gathers 8-bit pairs across rows, so they lie side by side in memory (``v_place``).

A program handles HEADS heads of one token; all heads run one code path (v heads get cos = 1, sin = 0, no norm), which
costs nothing where latency decides and keeps the loads of a row contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engines.kernels.impl import DeviceFacts, KernelConfig
from engines.kernels.jit import gdc_launch, gdc_wait, launch_options, next_pow2, scale_at, to_fp8, to_int8
from engines.kernels.quantize import FP8_MAX, INT8_MAX


@triton.jit
def to_cache(x, inverse_scale, dtype: tl.constexpr) -> tl.tensor:
    """float32 into the cache's dtype."""
    if dtype == tl.float8e4nv:
        r = to_fp8(x * inverse_scale)
    elif dtype == tl.int8:
        r = to_int8(x * inverse_scale)
    else:
        r = x.to(dtype)
    return r


@triton.jit
def v_place(inner, dims, block_size, head_dim, dtype: tl.constexpr) -> tl.tensor:
    """Where a token's V lies in its block's run: ``inner`` is its number in the block."""
    if dtype == tl.float8e4nv or dtype == tl.int8:
        r = dims * block_size + inner
    else:
        r = inner * head_dim + dims
    return r


@triton.jit
def _constants(bias_ptr, weight_q_ptr, weight_k_ptr, offsets, dims, is_q, mask) -> tuple[tl.tensor, tl.tensor]:
    """Bias (0 without) and norm weights (1 without) of a [HEADS, dims] part of a row, float32."""
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if weight_q_ptr is not None:
        in_head = mask & (offsets >= 0)
        weight_q = tl.load(weight_q_ptr + dims + tl.zeros_like(offsets), mask=in_head & is_q, other=0.0).to(tl.float32)
        weight_k = tl.load(weight_k_ptr + dims + tl.zeros_like(offsets), mask=in_head & ~is_q, other=0.0).to(tl.float32)
        weight = weight_q + weight_k
    else:
        weight = 1.0
    return bias, weight


@triton.jit
def _store_part(y, heads, dims, token, slot, mask, q_ptr, k_ptr, v_ptr, k_out_ptr, v_out_ptr, k_inverse, v_inverse,
                num_heads, num_kv_heads, head_dim, block_size) -> None:
    """Send a [HEADS, dims] part to q, K or V by its head number."""
    q_base = q_ptr + tl.cast(token, tl.int64) * num_heads * head_dim
    tl.store(q_base + heads * head_dim + dims, y.to(q_ptr.dtype.element_ty), mask=mask & (heads < num_heads))
    k_head = heads - num_heads
    v_head = k_head - num_kv_heads
    if k_out_ptr is not None:
        base = tl.cast(token, tl.int64) * num_kv_heads * head_dim + dims
        tl.store(k_out_ptr + base + k_head * head_dim, y.to(k_out_ptr.dtype.element_ty),
                 mask=mask & (k_head >= 0) & (v_head < 0))
        tl.store(v_out_ptr + base + v_head * head_dim, y.to(v_out_ptr.dtype.element_ty), mask=mask & (v_head >= 0))
    kept = mask & (slot >= 0)
    run = (slot // block_size) * num_kv_heads
    inner = slot % block_size
    tl.store(k_ptr + (run + k_head) * block_size * head_dim + inner * head_dim + dims,
             to_cache(y, k_inverse, k_ptr.dtype.element_ty), mask=kept & (k_head >= 0) & (v_head < 0))
    tl.store(v_ptr + (run + v_head) * block_size * head_dim
             + v_place(inner, dims, block_size, head_dim, v_ptr.dtype.element_ty),
             to_cache(y, v_inverse, v_ptr.dtype.element_ty), mask=kept & (v_head >= 0))


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def rope_kv_kernel(qkv_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, positions_ptr, slots_ptr, q_ptr, k_ptr,
                   v_ptr, k_out_ptr, v_out_ptr, k_scale_ptr, v_scale_ptr, qkv_stride, num_heads, num_kv_heads,
                   head_dim, rotary_half, block_size, eps, HEADS: tl.constexpr, HALF: tl.constexpr,
                   REST: tl.constexpr, PDL: tl.constexpr) -> None:
    """One program a token and HEADS heads. HALF >= rotary_dim / 2, REST >= head_dim - rotary_dim (0: none)."""
    token = tl.program_id(0)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, HALF)[None, :]
    rotated = heads < num_heads + num_kv_heads
    is_q = heads < num_heads
    known = heads < num_heads + 2 * num_kv_heads
    mask = known & (dims < rotary_half)
    gdc_launch(PDL)
    k_inverse, v_inverse = 1.0 / scale_at(k_scale_ptr), 1.0 / scale_at(v_scale_ptr)
    offsets = heads * head_dim + dims
    low_bias, low_weight = _constants(bias_ptr, q_norm_ptr, k_norm_ptr, offsets, dims, is_q, mask)
    high_bias, high_weight = _constants(bias_ptr, q_norm_ptr, k_norm_ptr, offsets + rotary_half, dims + rotary_half,
                                        is_q, mask)
    if REST > 0:
        tail = tl.arange(0, REST)[None, :] + 2 * rotary_half
        tail_mask = known & (tail < head_dim)
        rest_bias, rest_weight = _constants(bias_ptr, q_norm_ptr, k_norm_ptr, heads * head_dim + tail, tail, is_q,
                                            tail_mask)
    gdc_wait(PDL)
    row = qkv_ptr + tl.cast(token, tl.int64) * qkv_stride
    low = tl.load(row + offsets, mask=mask, other=0.0).to(tl.float32) + low_bias
    high = tl.load(row + offsets + rotary_half, mask=mask, other=0.0).to(tl.float32) + high_bias
    slot = tl.load(slots_ptr + token).to(tl.int64)
    table = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * rotary_half) + dims
    turn = mask & rotated
    cos = tl.load(table + tl.zeros_like(heads), mask=turn, other=1.0)
    sin = tl.load(table + rotary_half + tl.zeros_like(heads), mask=turn, other=0.0)
    if REST > 0:
        rest = tl.load(row + heads * head_dim + tail, mask=tail_mask, other=0.0).to(tl.float32) + rest_bias
    if q_norm_ptr is not None:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        rstd = tl.rsqrt(squares / head_dim + eps)[:, None]
        low = tl.where(rotated, low * rstd * low_weight, low)
        high = tl.where(rotated, high * rstd * high_weight, high)
        if REST > 0:
            rest = tl.where(rotated, rest * rstd * rest_weight, rest)
    _store_part(low * cos - high * sin, heads, dims, token, slot, mask, q_ptr, k_ptr, v_ptr, k_out_ptr, v_out_ptr,
                k_inverse, v_inverse, num_heads, num_kv_heads, head_dim, block_size)
    _store_part(high * cos + low * sin, heads, dims + rotary_half, token, slot, mask, q_ptr, k_ptr, v_ptr, k_out_ptr,
                v_out_ptr, k_inverse, v_inverse, num_heads, num_kv_heads, head_dim, block_size)
    if REST > 0:
        _store_part(rest, heads, tail, token, slot, tail_mask, q_ptr, k_ptr, v_ptr, k_out_ptr, v_out_ptr, k_inverse,
                    v_inverse, num_heads, num_kv_heads, head_dim, block_size)


def candidates(num_heads: int, num_kv_heads: int, device: DeviceFacts, tokens: int = 1) -> Sequence[KernelConfig]:
    """Heads a program to try for about ``tokens`` tokens; the first is the default: many heads once tokens are many."""
    pdl = device.capability >= 90
    sizes = ((2, 1), (4, 1), (8, 2), (16, 4))
    if tokens >= 16:
        sizes = sizes[::-1]
    return [KernelConfig.of("heads", HEADS=h, num_warps=w, pdl=pdl) for h, w in sizes
            if h < 2 * (num_heads + 2 * num_kv_heads)]


def v_shape(shape: Sequence[int], coded: bool) -> tuple[int, ...]:
    """V's shape beside a K cache of ``shape``: its last two sides change places where it is ``coded`` (8 bits)."""
    return (*shape[:-2], shape[-1], shape[-2]) if coded else tuple(shape)


def check_cache(k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None,
                v_scale: torch.Tensor | None) -> tuple[int, int, int]:
    """(num_kv_heads, block_size, head_dim) of a cache pair; ValueError where layout, dtype and scales do not fit."""
    coded = k_cache.dtype in (torch.float8_e4m3fn, torch.int8)
    if k_cache.dim() != 4 or v_cache.shape != v_shape(k_cache.shape, coded) or k_cache.dtype != v_cache.dtype:
        raise ValueError(f"K must be [blocks, kv heads, block_size, head_dim] and V alike, with 8 bits its last two "
                         f"sides turned; found {tuple(k_cache.shape)} {k_cache.dtype} and {tuple(v_cache.shape)} "
                         f"{v_cache.dtype}")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("KV caches must be contiguous")
    if coded != (k_scale is not None) or coded != (v_scale is not None):
        raise ValueError(f"k_scale and v_scale belong to fp8 and int8 caches, and to them alone; found {k_cache.dtype}")
    return k_cache.shape[1], k_cache.shape[2], k_cache.shape[3]


def _check(qkv: torch.Tensor, cos_sin: torch.Tensor, q_out: torch.Tensor, num_kv_heads: int, head_dim: int,
           q_norm: torch.Tensor | None, k_norm: torch.Tensor | None) -> tuple[int, int, int]:
    tokens, num_heads, q_dim = q_out.shape
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.shape != (tokens, width) or q_dim != head_dim or not q_out.is_contiguous():
        raise ValueError(f"qkv {tuple(qkv.shape)}, q_out {tuple(q_out.shape)} and {num_kv_heads} kv heads of "
                         f"{head_dim} do not fit")
    rotary_dim = cos_sin.shape[1]
    if rotary_dim % 2 or rotary_dim > head_dim or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
        raise ValueError(f"cos_sin must be contiguous float32 [max_pos, even <= {head_dim}], found "
                         f"{tuple(cos_sin.shape)}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm come together")
    return tokens, num_heads, rotary_dim


def _check_rows(k_out: torch.Tensor | None, v_out: torch.Tensor | None, shape: tuple[int, int, int]) -> None:
    for rows in (k_out, v_out):
        if (k_out is None) != (v_out is None) or (rows is not None and (rows.shape != shape
                                                                        or not rows.is_contiguous())):
            raise ValueError(f"k_out and v_out come together, contiguous {shape}, found "
                             f"{None if rows is None else tuple(rows.shape)}")


def launch(qkv: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor,
           q_out: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, config: KernelConfig, *,
           bias: torch.Tensor | None = None, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None,
           eps: float = 1e-6, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
           k_out: torch.Tensor | None = None, v_out: torch.Tensor | None = None) -> None:
    """Fill ``q_out`` [t, q heads, head_dim] and the caches at ``slot_mapping`` [t] (int32 or int64, -1 = skip).

    ``qkv`` [t, (q heads + 2 kv heads) * head_dim]; ``positions`` [t] index ``cos_sin``. ``k_out`` and ``v_out`` [t, kv
    heads, head_dim], both or neither, also get the rows (for prefill attention without a cached prefix). Graph safe.
    """
    num_kv_heads, block_size, head_dim = check_cache(k_cache, v_cache, k_scale, v_scale)
    tokens, num_heads, rotary_dim = _check(qkv, cos_sin, q_out, num_kv_heads, head_dim, q_norm, k_norm)
    _check_rows(k_out, v_out, (tokens, num_kv_heads, head_dim))
    if tokens == 0:
        return
    rest = head_dim - rotary_dim
    rope_kv_kernel[(tokens, triton.cdiv(num_heads + 2 * num_kv_heads, config["HEADS"]))](
        qkv, bias, q_norm, k_norm, cos_sin, positions, slot_mapping, q_out, k_cache, v_cache, k_out, v_out, k_scale,
        v_scale, qkv.stride(0), num_heads, num_kv_heads, head_dim, rotary_dim // 2, block_size, eps,
        HEADS=config["HEADS"], HALF=next_pow2(rotary_dim // 2), REST=next_pow2(rest) if rest else 0,
        **launch_options(config))


def cache_codes(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """float32 values as the cache stores them."""
    if scale is None:
        return x.to(dtype)
    coded = x * (1.0 / scale.float())
    if dtype == torch.int8:
        return coded.clamp(-INT8_MAX, INT8_MAX).round().to(dtype)
    return coded.clamp(-FP8_MAX, FP8_MAX).to(dtype)


def twin(qkv: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor,
         q_out: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, config: KernelConfig | None = None, *,
         bias: torch.Tensor | None = None, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None,
         eps: float = 1e-6, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
           k_out: torch.Tensor | None = None, v_out: torch.Tensor | None = None) -> None:
    """The same in plain torch, float32 inside."""
    num_kv_heads, block_size, head_dim = check_cache(k_cache, v_cache, k_scale, v_scale)
    tokens, num_heads, rotary_dim = _check(qkv, cos_sin, q_out, num_kv_heads, head_dim, q_norm, k_norm)
    _check_rows(k_out, v_out, (tokens, num_kv_heads, head_dim))
    wide = qkv.float() if bias is None else qkv.float() + bias.float()
    heads = wide.reshape(tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + eps) * q_norm.float()
        k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + eps) * k_norm.float()
    cos, sin = cos_sin[positions.long()][:, None].chunk(2, -1)

    def turn(x: torch.Tensor) -> torch.Tensor:
        low, high, rest = x.split([rotary_dim // 2, rotary_dim // 2, head_dim - rotary_dim], -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)

    q_out.copy_(turn(q))
    if k_out is not None and v_out is not None:
        k_out.copy_(turn(k))
        v_out.copy_(v)
    kept = slot_mapping >= 0
    slot = slot_mapping[kept].long()
    k_cache[slot // block_size, :, slot % block_size] = cache_codes(turn(k)[kept], k_scale, k_cache.dtype)
    rows = v_cache.transpose(2, 3) if v_scale is not None else v_cache
    rows[slot // block_size, :, slot % block_size] = cache_codes(v[kept], v_scale, v_cache.dtype)
