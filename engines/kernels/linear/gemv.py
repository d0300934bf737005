"""Matrix times one to four vectors: the decode step of a small batch, bound by reading the weights once.

    out[t, r] = sum_c x[t, c] * weight[r, c]        t < m <= 4,  r < n,  c < k

Layout. A program owns ``BLOCK_N`` rows and walks along k in tiles of ``BLOCK_K`` units. A unit (``UNIT``) is one 16-bit
element ("float"), a 32-bit word of four int8 codes, or a 64-bit word of eight e4m3 codes; a thread loads 16 bytes::

    weight [n, k]           row r   | w0 w1 w2 w3 | w4 w5 w6 w7 | ...      thread j holds words 4j..4j+3 of each row
    x      [m, k]           row t   | x0 x1 x2 x3 | ...                    loaded in the same layout: nothing is moved

The accumulator keeps one partial sum per (t, r, unit) in registers; lanes and warps are reduced once, at the end.

Overlap. With PDL the first weight tile is asked for *before* ``gdc_wait``: weights never depend on the previous kernel,
so the memory stays busy across the kernel boundary (about 2 us a kernel otherwise). ``LOOP`` 0 holds the next tile in
registers while the current one is used, 1 is a plain loop, more is an asynchronous pipeline of that many stages. Scales
and bias are asked for with that first tile, too: read at the end, as late as they are used, each program would wait
once more for memory with nothing else to do.

``GATED``: the weight is a stacked gate and up, [2 inter, k]; a program takes BLOCK_N / 2 rows of each, the same ones,
and stores silu(gate) * up, [m, inter], so that the gated activation needs no kernel of its own (bf16, or fp8 by a
static scale). Gate and up are not rounded in between.

Arithmetic, by ``KIND``:

* ``float``: 16-bit weights and activations, widened, fp32 multiply-add.
* ``int8``: ``dp4a``, four products a word into int32: exact.
* ``fp8``: e4m3 codes are widened to fp16 without loss and multiplied two at a time. Activations are scaled by 2^-8
  first (also exact), so that a product stays below 448 * 448 / 256 = 784; four products are summed in fp16, then added
  to an fp32 accumulator. That is finer than the tensor cores' own fp8 accumulation. All eight codes lie in one unit on
  purpose: which units a thread holds side by side is the compiler's choice, and may be two different rows.
* ``int8_weight``: a byte b is put into a float's mantissa, 2^23 + (b + 128), and the constant subtracted: an exact
  conversion in two instructions instead of the slow integer-to-float one; x is bf16, four values in one int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engines.kernels.impl import KernelConfig
from engines.kernels.jit import HAS_ASM, dp4a, gdc_launch, gdc_wait, launch_options, next_pow2, silu, to_fp8

MAX_ROWS = 4
UNIT = {"float": 1, "int8": 4, "int8_weight": 4, "fp8": 8}
"""Elements of k a unit holds, by KIND."""
_WEIGHT_UNIT = {"int8": torch.int32, "int8_weight": torch.int32, "fp8": torch.int64}
_X_UNIT = {"int8": torch.int32, "int8_weight": torch.int64, "fp8": torch.int64}


@triton.jit
def _e4m3_pairs(word, ASM: tl.constexpr):
    """Four e4m3 codes in a word -> two words of two fp16 each: (codes 0, 1) and (codes 2, 3); values exact."""
    if ASM:
        lo, hi = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
    else:
        lo = _e4m3_bits(word) | (_e4m3_bits(word >> 8) << 16)
        hi = _e4m3_bits(word >> 16) | (_e4m3_bits(word >> 24) << 16)
    return lo, hi


@triton.jit
def _e4m3_bits(code):
    """The fp16 bits of one e4m3 code in the low byte: same fields, exponent re-biased by a multiplication."""
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)  # the value times 2^-8
    value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _shrink(pair, ASM: tl.constexpr):
    """Two fp16 in a word, times 2^-8."""
    if ASM:
        return tl.inline_asm_elementwise("{ .reg .b32 c; mov.b32 c, 0x1c001c00; mul.rn.f16x2 $0, $1, c; }", "=r,r",
                                         [pair], dtype=tl.int32, is_pure=True, pack=1)
    lo = (_half(pair) * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    hi = (_half(pair >> 16) * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return lo | (hi << 16)


@triton.jit
def _half(pair):
    """The low fp16 of a word as fp32."""
    return pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _dot_octets(w0, w1, w2, w3, x0, x1, x2, x3, acc, ASM: tl.constexpr):
    """acc + the dot product of eight fp16 pairs in four words each; four products are summed in each fp16 half."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 p; .reg .b16 l, h; .reg .f32 f, g;
            mul.rn.f16x2 p, $1, $5; fma.rn.f16x2 p, $2, $6, p; fma.rn.f16x2 p, $3, $7, p; fma.rn.f16x2 p, $4, $8, p;
            mov.b32 {l, h}, p; cvt.f32.f16 f, l; cvt.f32.f16 g, h; add.f32 f, f, g; add.f32 $0, $9, f; }""",
            "=f,r,r,r,r,r,r,r,r,f", [w0, w1, w2, w3, x0, x1, x2, x3, acc], dtype=tl.float32, is_pure=True, pack=1)
    acc += _half(w0) * _half(x0) + _half(w0 >> 16) * _half(x0 >> 16)
    acc += _half(w1) * _half(x1) + _half(w1 >> 16) * _half(x1 >> 16)
    acc += _half(w2) * _half(x2) + _half(w2 >> 16) * _half(x2 >> 16)
    return acc + _half(w3) * _half(x3) + _half(w3 >> 16) * _half(x3 >> 16)


@triton.jit
def _accumulate_fp8(acc, w, x, ASM: tl.constexpr):
    w0, w1 = _e4m3_pairs(w.to(tl.int32), ASM)
    w2, w3 = _e4m3_pairs((w >> 32).to(tl.int32), ASM)
    x0, x1 = _e4m3_pairs(x.to(tl.int32), ASM)
    x2, x3 = _e4m3_pairs((x >> 32).to(tl.int32), ASM)
    return _dot_octets(tl.broadcast_to(w0, acc.shape), tl.broadcast_to(w1, acc.shape),
                       tl.broadcast_to(w2, acc.shape), tl.broadcast_to(w3, acc.shape),
                       tl.broadcast_to(_shrink(x0, ASM), acc.shape), tl.broadcast_to(_shrink(x1, ASM), acc.shape),
                       tl.broadcast_to(_shrink(x2, ASM), acc.shape), tl.broadcast_to(_shrink(x3, ASM), acc.shape),
                       acc, ASM)


@triton.jit
def _byte_to_float(word, BYTE: tl.constexpr):
    """Byte ``BYTE`` of (word xor 0x80808080), exactly, as the signed number it was before the xor."""
    bits = ((word >> (8 * BYTE)) & 0xFF) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - 8388736.0  # 2^23 + 128


@triton.jit
def _bf16_lo(word):
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _bf16_hi(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _accumulate(acc, w, x, KIND: tl.constexpr, ASM: tl.constexpr):
    """One tile: acc [T, N, K] + w [1, N, K] * x [T, 1, K], unit by unit."""
    if KIND == "float":
        acc += w.to(tl.float32) * x.to(tl.float32)
    elif KIND == "int8":
        acc = dp4a(tl.broadcast_to(w, acc.shape), tl.broadcast_to(x, acc.shape), acc, ASM)
    elif KIND == "fp8":
        acc = _accumulate_fp8(acc, w, x, ASM)
    else:
        tl.static_assert(KIND == "int8_weight")
        biased = w ^ -2139062144  # 0x80808080
        lo = x.to(tl.int32)
        hi = (x >> 32).to(tl.int32)
        acc += _byte_to_float(biased, 0) * _bf16_lo(lo)
        acc += _byte_to_float(biased, 1) * _bf16_hi(lo)
        acc += _byte_to_float(biased, 2) * _bf16_lo(hi)
        acc += _byte_to_float(biased, 3) * _bf16_hi(hi)
    return acc


@triton.jit
def _weights(pointers, offsets, k, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(pointers, cache_modifier=".cg")
    return tl.load(pointers, mask=offsets < k, other=0, cache_modifier=".cg")


@triton.jit
def _load(pointers, offsets, k, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(pointers)
    return tl.load(pointers, mask=offsets < k, other=0)


@triton.jit
def _inputs(rows, start, k, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Units ``start ...`` of each token row [ROWS, 1, BLOCK_K]."""
    at = start + tl.arange(0, BLOCK_K)[None, None, :]
    return _load(rows[:, None, None] + at, at, k, EVEN_K)


@triton.jit
def _store_gated(total, out_scale, out_ptr, first, token, m, inter, ROWS: tl.constexpr, HALF: tl.constexpr) -> None:
    """Sums [ROWS, gate rows then up rows] -> silu(gate) * up in columns ``first`` ... of out [m, inter]."""
    gate, up = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, HALF)), (0, 2, 1)))
    y = silu(gate) * up
    column = first + tl.arange(0, HALF)
    at = out_ptr + token[:, None] * inter + column[None, :]
    mask = (token < m)[:, None] & (column < inter)[None, :]
    if out_ptr.dtype.element_ty == tl.float8e4nv:
        tl.store(at, to_fp8(y * (1.0 / out_scale)), mask=mask)
    else:
        tl.store(at, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["m"], do_not_specialize_on_alignment=["x_scale_ptr", "out_scale_ptr"])
def gemv_kernel(x_ptr, w_ptr, w_scale_ptr, x_scale_ptr, bias_ptr, out_scale_ptr, out_ptr, m, n, k, KIND: tl.constexpr,
                ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LOOP: tl.constexpr,
                EVEN_K: tl.constexpr, PER_TOKEN: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
                PDL: tl.constexpr, ASM: tl.constexpr) -> None:
    """``k`` counts units. ROWS (1, 2, 4) >= m; token rows beyond m and weight rows beyond n repeat the last one."""
    HALF: tl.constexpr = BLOCK_N // 2
    local = tl.arange(0, BLOCK_N)
    token = tl.arange(0, ROWS)
    unit = tl.arange(0, BLOCK_K)[None, None, :]
    if GATED:
        first = tl.program_id(0) * HALF
        valid = tl.minimum(local % HALF, n // 2 - 1 - first) + local // HALF * (n // 2)
    else:
        first = tl.program_id(0) * BLOCK_N
        valid = tl.minimum(local, n - 1 - first)
    w_at = w_ptr + first.to(tl.int64) * k + (valid[None, :, None] * k + unit)
    x_rows = x_ptr + tl.minimum(token, m - 1) * k
    acc = tl.zeros((ROWS, BLOCK_N, BLOCK_K), tl.int32 if KIND == "int8" else tl.float32)
    gdc_launch(PDL)
    if LOOP == 0:
        w = _weights(w_at, unit, k, EVEN_K)
    if KIND != "float":
        w_scale = tl.load(w_scale_ptr + first + valid)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + first + valid).to(tl.float32)
    out_scale = 1.0
    if GATED and out_ptr.dtype.element_ty == tl.float8e4nv:
        out_scale = tl.load(out_scale_ptr)
    gdc_wait(PDL)
    if KIND == "int8" or KIND == "fp8":
        x_scale = tl.load(x_scale_ptr + tl.minimum(token, m - 1) * PER_TOKEN)
    if LOOP == 0:
        for start in range(BLOCK_K, k, BLOCK_K):
            w_next = _weights(w_at + start, start + unit, k, EVEN_K)
            x = _inputs(x_rows, start - BLOCK_K, k, BLOCK_K, EVEN_K)
            acc = _accumulate(acc, w, x, KIND, ASM)
            w = w_next
        last = (k - 1) // BLOCK_K * BLOCK_K
        acc = _accumulate(acc, w, _inputs(x_rows, last, k, BLOCK_K, EVEN_K), KIND, ASM)
    else:
        for start in tl.range(0, k, BLOCK_K, num_stages=LOOP):
            w = _weights(w_at + start, start + unit, k, EVEN_K)
            x = _inputs(x_rows, start, k, BLOCK_K, EVEN_K)
            acc = _accumulate(acc, w, x, KIND, ASM)
    total = tl.sum(acc, 2).to(tl.float32)
    if KIND != "float":
        total *= w_scale[None, :]
    if KIND == "int8" or KIND == "fp8":
        total *= x_scale[:, None]
    if KIND == "fp8":
        total *= 256.0
    if HAS_BIAS:
        total += bias[None, :]
    if GATED:
        _store_gated(total, out_scale, out_ptr, first, token, m, n // 2, ROWS, HALF)
    else:
        at = out_ptr + token[:, None] * n + (first + local)[None, :]
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(token < m)[:, None] & (first + local < n)[None, :])


def launch_gemv(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: KernelConfig, kind: str, *,
                w_scale: torch.Tensor | None, x_scale: torch.Tensor | None, bias: torch.Tensor | None,
                gated: bool = False, out_scale: torch.Tensor | None = None) -> None:
    """out [m, n] = x [m, k] weight [n, k]^T for 1 <= m <= 4; every tensor contiguous, its address a multiple of 16.

    ``config.meta``: ROWS >= m, BLOCK_N, BLOCK_K (units), LOOP. k must be a multiple of UNIT[kind]. ``gated``: out is
    [m, n / 2], silu of the first half of the rows times the second; fp8 with ``out_scale`` [].
    """
    m, n = out.shape[0], weight.shape[0]
    if not 1 <= m <= config["ROWS"] <= MAX_ROWS:
        raise ValueError(f"gemv with ROWS={config['ROWS']} was asked for {m} rows")
    if gated and (config["BLOCK_N"] < 2 or n % 2 or (out_scale is not None) != (out.dtype == torch.float8_e4m3fn)):
        raise ValueError(f"gated: BLOCK_N {config['BLOCK_N']} >= 2, an even n {n}, and a scale with fp8, {out.dtype}")
    units = weight.shape[1] // UNIT[kind]
    if kind != "float":
        weight, x = weight.view(_WEIGHT_UNIT[kind]), x.view(_X_UNIT[kind])
    some = weight  # an unused pointer still needs a tensor
    gemv_kernel[(triton.cdiv(n, config["BLOCK_N"]),)](
        x, weight, some if w_scale is None else w_scale, some if x_scale is None else x_scale,
        some if bias is None else bias, some if out_scale is None else out_scale, out, m, n, units, KIND=kind,
        ROWS=config["ROWS"], BLOCK_N=config["BLOCK_N"], BLOCK_K=config["BLOCK_K"], LOOP=config["LOOP"],
        EVEN_K=units % config["BLOCK_K"] == 0, PER_TOKEN=x_scale is not None and x_scale.ndim > 0,
        HAS_BIAS=bias is not None, GATED=gated, ASM=HAS_ASM, **launch_options(config))


def gemv_rows(m: int) -> int:
    """The ROWS a batch of m needs."""
    return next_pow2(m)
