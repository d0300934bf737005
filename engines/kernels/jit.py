"""The small device-side words that every kernel file speaks. One place, no copies.

Rules they carry:

* **Arithmetic is float32.** A loaded bf16/fp16/fp8/int8 value goes through ``.to(tl.float32)`` before any sum. (bf16
  arithmetic is also wrong in Triton's interpreter, which the CPU tests use.)
* **PDL** (programmatic dependent launch): the next kernel of a stream may start while the previous one still runs.
  ``gdc_launch`` says "start them now", ``gdc_wait`` says "from here on I read what kernels before me wrote". The wait
  covers *all* earlier kernels, as each of them waited too. Only constants (weights, tables) may be read before it, and
  nothing may be written before it. Both vanish when ``PDL`` is False (and must be False in the interpreter).
* **No compile after the build**: numbers that change from step to step (batch, capacity, strides of tables) and
pointers
  that may be slices (seq_lens, tables, positions) are never specialised; model constants are, as alignment needs it.
* **Quantized activations** always carry the scale that *multiplies* the code: ``value = code * scale``.

  ==============  ===============================  ==========================
  mode            scale                            where it lies
  ==============  ===============================  ==========================
  NONE            none (bf16, fp16 or fp32 out)
  FP8_STATIC      given ``input_scale`` [] f32     read, not written
  FP8_TOKEN       amax(row) / 448                  ``scales`` [m] f32
  INT8_TOKEN      amax(row) / 127                  ``scales`` [m] f32
  INT8_GROUP      amax(group of the row) / 127     ``scales`` [m, n/group] f32
  FP8_GROUP       amax(group of the row) / 448     ``scales`` [m, n/group] f32
  INT8_STATIC     given ``input_scale`` [] f32     read, not written
  ==============  ===============================  ==========================

  Codes: fp8 e4m3 saturating at +-448 (NaN stays NaN), int8 round-half-even in [-127, 127]. An all-zero row gets the
  scale of the smallest amax (1e-12), so no division by zero and codes 0.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import triton
import triton.language as tl

from engines.kernels.impl import KernelConfig

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True when kernels run in Triton's interpreter (no GPU): no inline asm, no PDL, no bf16 dot."""
HAS_ASM = not INTERPRETED
"""What launchers pass as the constexpr ``ASM``."""


class ActQuant(IntEnum):
    """How a kernel's epilogue stores an activation (module docstring). Passed as the constexpr ``QUANT``."""

    NONE = 0
    FP8_STATIC = 1
    FP8_TOKEN = 2
    INT8_TOKEN = 3
    INT8_GROUP = 4
    FP8_GROUP = 5
    INT8_STATIC = 6

    @property
    def per_group(self) -> bool:
        return self in (ActQuant.INT8_GROUP, ActQuant.FP8_GROUP)

    @property
    def static(self) -> bool:
        return self in (ActQuant.FP8_STATIC, ActQuant.INT8_STATIC)

    @property
    def fp8(self) -> bool:
        return self in (ActQuant.FP8_STATIC, ActQuant.FP8_TOKEN, ActQuant.FP8_GROUP)

    @property
    def per_token(self) -> bool:
        return self in (ActQuant.FP8_TOKEN, ActQuant.INT8_TOKEN)


_INTERPRETED = tl.constexpr(INTERPRETED)
_NONE = tl.constexpr(0)
_FP8_STATIC = tl.constexpr(1)
_FP8_TOKEN = tl.constexpr(2)
_INT8_TOKEN = tl.constexpr(3)
_INT8_GROUP = tl.constexpr(4)
_FP8_GROUP = tl.constexpr(5)
_INT8_STATIC = tl.constexpr(6)


def next_pow2(n: int) -> int:
    """The smallest power of two >= n (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


def launch_options(config: KernelConfig) -> dict[str, Any]:
    """Launch keywords of a config: ``PDL`` is the kernel's constexpr, ``launch_pdl`` the launch attribute; a config's
    ``REGISTERS``, if there are any, are the most that a thread may have."""
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages, "PDL": config.pdl}
    if config.pdl:
        options["launch_pdl"] = True
    if config.get("REGISTERS"):
        options["maxnreg"] = config["REGISTERS"]
    return options


@triton.jit
def gdc_launch(PDL: tl.constexpr) -> None:
    """Let the dependent kernels start (they still wait before reading what we write)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def gdc_wait(PDL: tl.constexpr) -> None:
    """Wait until all earlier kernels of the stream have finished and their writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def tanh(x) -> tl.tensor:
    """tanh by exp; saturates correctly at both ends (exp overflows to inf -> 1, underflows to 0 -> -1)."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def silu(x) -> tl.tensor:
    """x * sigmoid(x), float32. The divisor is at least 1, so the fast reciprocal (1 ulp, inf -> 0) needs no care."""
    divisor = 1.0 + tl.exp2(x * -1.4426950408889634)
    if _INTERPRETED:
        inverse = 1.0 / divisor
    else:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], dtype=tl.float32,
                                            is_pure=True, pack=1)
    return x * inverse


@triton.jit
def _add_and_larger(a, b, c, d):
    return a + c, tl.maximum(b, d)


@triton.jit
def sum_and_max(x, y) -> tuple[tl.tensor, tl.tensor]:
    """(sum of ``x``, largest of ``y``), both [N], in one reduction: the second would cost three more barriers."""
    if _INTERPRETED:  # which walks through a custom reduction number by number
        r = tl.sum(x, 0), tl.max(y, 0)
    else:
        r = tl.reduce((x, y), 0, _add_and_larger)
    return r


@triton.jit
def round_even(x) -> tl.tensor:
    """Round to nearest, ties to even, for |x| < 2**22: adding 1.5 * 2**23 leaves no fraction bits in a float32."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def clamp_fp8(x) -> tl.tensor:
    """Into the finite range of e4m3; NaN passes through, so that a fault stays visible."""
    x = tl.minimum(x, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def to_fp8(x) -> tl.tensor:
    """float32 -> e4m3, saturating, ties to even. The interpreter's own cast loses the carry of a rounding and all
    subnormals, so there the code is put together from the float's bits."""
    x = clamp_fp8(x)
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        rounded = size + 0x7FFFF + ((size >> 20) & 1)  # to 3 mantissa bits
        small = round_even(tl.abs(x) * 512.0).to(tl.int32)  # multiples of 2**-9, the subnormal step
        code = tl.where(size < 0x3C800000, small, (rounded >> 20) - 960)  # 2**-6; exponent bias 127 -> 7
        code = tl.where(size > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)
        r = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        r = x.to(tl.float8e4nv)
    return r


@triton.jit
def to_int8(x) -> tl.tensor:
    """float32 -> int8 in [-127, 127], ties to even."""
    return round_even(tl.minimum(tl.maximum(x, -127.0), 127.0)).to(tl.int8)


@triton.jit
def scale_at(scale_ptr) -> tl.tensor:
    """The scale at ``scale_ptr``, 1.0 where there is none. Scales that the build fixed are read before PDL's wait: at
    the end of a kernel nothing would hide their way from memory (a step's weights drive them out of the caches)."""
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    return scale


@triton.jit
def scale_of(amax, QMAX: tl.constexpr) -> tl.tensor:
    """The scale that maps ``amax`` to the largest code."""
    return tl.maximum(amax, 1e-12) / QMAX


@triton.jit
def dp4a(a, b, c, ASM: tl.constexpr) -> tl.tensor:
    """c + dot of the four int8 lanes of int32 words a and b: ``dp4a`` on CUDA, shifts elsewhere (same integers)."""
    if ASM:
        r = tl.inline_asm_elementwise("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32,
                                      is_pure=True, pack=1)
    else:
        r = c
        for i in tl.static_range(4):
            r += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
    return r


@triton.jit
def store_act(y, amax, row, cols, mask, first, end, out_ptr, out_stride, scales_ptr, num_groups, input_scale,
              QUANT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Epilogue: store ``y`` [BLOCK] float32 (zero where masked off) as columns ``cols`` of ``row``, quantized by QUANT.

    ``amax`` is the amax of the whole row: read by the per-token modes only (others pass 0.0). For the group modes
    ``cols`` is the run of columns from ``first``, a multiple of GROUP, of which those below ``end`` exist; GROUP
    divides BLOCK and the row (others pass 0 and 0; found by reductions, they would cost ten barriers). ``input_scale``
    is the static modes' (``scale_at``). ``out_stride`` is the rows' stride; group scales are contiguous [m,
    num_groups]; offsets are int64.
    """
    base = out_ptr + tl.cast(row, tl.int64) * out_stride
    if QUANT == _NONE:
        tl.store(base + cols, y.to(out_ptr.dtype.element_ty), mask=mask)
    elif QUANT == _FP8_STATIC:
        tl.store(base + cols, to_fp8(y * (1.0 / input_scale)), mask=mask)
    elif QUANT == _INT8_STATIC:
        tl.store(base + cols, to_int8(y * (1.0 / input_scale)), mask=mask)
    elif QUANT == _FP8_TOKEN:
        scale = scale_of(amax, 448.0)
        tl.store(base + cols, to_fp8(y * (1.0 / scale)), mask=mask)
        tl.store(scales_ptr + row, scale)
    elif QUANT == _INT8_TOKEN:
        scale = scale_of(amax, 127.0)
        tl.store(base + cols, to_int8(y * (1.0 / scale)), mask=mask)
        tl.store(scales_ptr + row, scale)
    else:
        tl.static_assert((QUANT == _INT8_GROUP) | (QUANT == _FP8_GROUP), "unknown QUANT")
        tl.static_assert(BLOCK % GROUP == 0, "GROUP must divide BLOCK")
        grouped = tl.reshape(y, (BLOCK // GROUP, GROUP))
        scale = scale_of(tl.max(tl.abs(grouped), 1), 448.0 if QUANT == _FP8_GROUP else 127.0)
        scaled = tl.reshape(grouped * (1.0 / scale)[:, None], (BLOCK,))
        if QUANT == _FP8_GROUP:
            tl.store(base + cols, to_fp8(scaled), mask=mask)
        else:
            tl.store(base + cols, to_int8(scaled), mask=mask)
        groups = first // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(scales_ptr + tl.cast(row, tl.int64) * num_groups + groups, scale, mask=groups * GROUP < end)


@triton.jit
def dot_operand(x, EXACT: tl.constexpr) -> tl.tensor:
    """A loaded tile as tl.dot takes it: 8-bit KV codes become fp16 (e4m3 and int8 fit exactly, and fp8's hardware
    conversion goes there), 16-bit stays. EXACT (the interpreter, where bf16 dots are wrong): all float32."""
    if EXACT:
        r = x.to(tl.float32)
    elif x.dtype == tl.float8e4nv or x.dtype == tl.int8:
        r = x.to(tl.float16)
    else:
        r = x
    return r


@triton.jit
def settled(acc) -> tl.tensor:
    """``acc`` after a product whose first operand was made in registers, once the product is done.

    Hopper's warpgroup product reads such an operand while the program goes on. In a loop whose sums are used by nothing
    but the next product, Triton 3.6 lets all but one of a turn's products be under way when the next turn begins, and
    the next operand is then written into registers that are still being read: wrong sums, now and then (seen on an
    H200). A use of the sums, if by an instruction that does nothing, has it wait. ``sass`` finds the others.
    """
    if not _INTERPRETED:
        acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


@triton.jit
def arrives_last(counter_ptr, count) -> tl.tensor:
    """True in the last of ``count`` programs to come here; what the earlier ones stored is visible to it then.

    The barrier puts every thread's stores before the count, whose release/acquire order carries them across programs.
    The last one also sets the counter back to zero for the next kernel.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter_ptr, 0)
    return last
