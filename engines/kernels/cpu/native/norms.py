"""Row-wise work: RMSNorm, gated SiLU, and the quantization of rows, float32 in registers.

Quantized rows are codes and one scale a row: int8 codes widened to int16 (what the matrix kernel multiplies), fp8 codes
as float32 numbers. Where a scale is not a whole row's, or where int8 rows meet float32 kernels, they are the numbers
that codes times scales stand for (``VALUES``: rounded, and float32 again). A NaN anywhere in a row makes its scale NaN
and with it every output: amax is taken over the bits of |x|, where NaN is above infinity.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numba import njit

from engines.kernels.cpu.native.ir import bits_of, floats, from_bits, nearest, shorts

#: Sums may be reordered (to run in lanes) and multiply-adds fused; NaN and infinity keep their meaning.
SUMS = {"reassoc", "contract", "nsz"}
_TINY = np.float32(1e-30)
_ONE = np.float32(1.0)


class Coding(IntEnum):
    """How rows are quantized."""

    NONE, INT8_TOKEN, INT8_STATIC, FP8_STATIC, FP8_TOKEN = range(5)
    INT8_VALUES, FP8_VALUES, INT8_VALUES_STATIC = range(5, 8)


@njit(inline="always", error_model="numpy")
def exp(x: Any) -> Any:
    """e^x to 2 units in the last place, by Cody and Waite's reduction and a polynomial (Cephes expf's coefficients).

    Below -87 it is e^-87, above 88 e^88; NaN stays NaN.
    """
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    n = nearest(x * np.float32(1.44269504088896341))
    r = x - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    y = p * r * r + r + _ONE
    return y * from_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(inline="always", error_model="numpy")
def to_e4m3(x: Any) -> Any:
    """The e4m3 number nearest to x, ties to even, saturated at 448 (OCP 8-bit floating point)."""
    bits = bits_of(x) & np.int32(0x7FFFFFFF)
    exponent = bits & np.int32(0x7F800000)
    exponent = exponent if exponent > np.int32(121 << 23) else np.int32(121 << 23)
    step = from_bits(exponent - np.int32(3 << 23))
    y = nearest(x / step) * step
    y = np.float32(448.0) if y > np.float32(448.0) else y
    return np.float32(-448.0) if y < np.float32(-448.0) else y


@njit(inline="always", error_model="numpy")
def to_int8(x: Any) -> Any:
    """The int8 code nearest to x, ties to even, in [-127, 127], as a float32 (NaN stays NaN)."""
    y = nearest(x)
    y = np.float32(127.0) if y > np.float32(127.0) else y
    return np.float32(-127.0) if y < np.float32(-127.0) else y


@njit(nogil=True, error_model="numpy", fastmath=SUMS)
def _square_sum(x: Any) -> Any:
    total = np.float32(0.0)
    for i in range(x.size):
        total += x[i] * x[i]
    return total


@njit(nogil=True, error_model="numpy")
def _amax(x: Any) -> Any:
    top = np.int32(0)
    for i in range(x.size):
        bits = bits_of(x[i]) & np.int32(0x7FFFFFFF)
        top = max(top, bits)
    return from_bits(top)


@njit(inline="always", error_model="numpy")
def _step(x: Any, largest: Any) -> Any:
    """The scale that maps the largest magnitude in x to the largest code."""
    amax: Any = _amax(x)
    amax = _TINY if amax < _TINY else amax
    return amax / np.float32(largest)


@njit(nogil=True, error_model="numpy")
def round_values(y: Any, coding: int, static: float, group: int) -> None:
    """y to the nearest numbers of its grid, in place; ``group`` inputs share a scale (the last ones may be fewer)."""
    for first in range(0, y.size, group):
        part = y[first:first + group]
        if coding == 6:
            step: Any = _step(part, 448.0)
            for i in range(part.size):
                part[i] = to_e4m3(part[i] / step) * step
        else:
            step = np.float32(static) if coding == 7 else _step(part, 127.0)
            for i in range(part.size):
                part[i] = to_int8(part[i] / step) * step


@njit(nogil=True, error_model="numpy")
def quantize_row(y: Any, coding: int, static: float, multiplier: int, codes: int, scale: int, group: int) -> None:
    """Rows y [n] (overwritten) times ``multiplier`` [n], coded at ``codes``, with their scale at ``scale``.

    For NONE, fp8 and VALUES ``codes`` is float32 and y itself; for int8 it is int16. VALUES write no scale; ``group``
    is theirs.
    """
    n = y.size
    if multiplier != 0:
        by = floats(multiplier, n)
        for i in range(n):
            y[i] *= by[i]
    if coding == 0:
        return
    if coding >= 5:
        round_values(y, coding, static, group)
        return
    if coding == 1 or coding == 4:
        step: Any = _step(y, 127.0 if coding == 1 else 448.0)
    else:
        step = np.float32(static)
    floats(scale, 1)[0] = step
    if coding <= 2:
        whole = shorts(codes, n)
        for i in range(n):
            whole[i] = np.int16(np.int32(to_int8(y[i] / step)))
        if n % 2:
            shorts(codes, n + 1)[n] = 0
    else:
        for i in range(n):
            y[i] = to_e4m3(y[i] / step)


@njit(nogil=True, error_model="numpy")
def norm_row(x: Any, weight: Any, eps: float, y: Any) -> None:
    """y = x / sqrt(mean(x^2) + eps) * weight."""
    n = x.size
    by = _ONE / np.sqrt(_square_sum(x) / np.float32(n) + np.float32(eps))
    for i in range(n):
        y[i] = x[i] * by * weight[i]


@njit(nogil=True, error_model="numpy")
def add_row(x: Any, residual: Any, out: Any) -> None:
    """out = x + residual."""
    for i in range(x.size):
        out[i] = x[i] + residual[i]


@njit(inline="always", error_model="numpy")
def tanh(x: Any) -> Any:
    """tanh x to 1e-7, and to 4e-7 of itself: 1 - 2 / (e^2x + 1), and its series where that would cancel; NaN stays.

    The sign comes last: below zero the quotient would be near 2, where a float32 is twice as coarse.
    """
    e = exp(abs(x) + abs(x))
    far = _ONE - np.float32(2.0) / (e + _ONE)
    far = -far if x < np.float32(0.0) else far
    s = x * x
    p = np.float32(62.0 / 2835.0)
    p = p * s - np.float32(17.0 / 315.0)
    p = p * s + np.float32(2.0 / 15.0)
    p = p * s - np.float32(1.0 / 3.0)
    near = x + x * s * p
    return near if s < np.float32(0.0625) else far


@njit(nogil=True, error_model="numpy")
def cap_row(x: Any, cap: float, y: Any) -> None:
    """y = cap * tanh(x / cap)."""
    top = np.float32(cap)
    for i in range(x.size):
        y[i] = top * tanh(x[i] / top)


@njit(nogil=True, error_model="numpy")
def gelu_row(gate: Any, up: Any, y: Any) -> None:
    """y = 0.5 * gate * (1 + tanh(sqrt(2/pi) * (gate + 0.044715 gate^3))) * up."""
    for i in range(gate.size):
        g = gate[i]
        inner = np.float32(0.7978845608028654) * (g + np.float32(0.044715) * g * g * g)
        y[i] = np.float32(0.5) * g * (_ONE + tanh(inner)) * up[i]


@njit(nogil=True, error_model="numpy")
def silu_row(gate: Any, up: Any, y: Any) -> None:
    """y = gate * sigmoid(gate) * up."""
    for i in range(gate.size):
        g = gate[i]
        y[i] = g / (_ONE + exp(-g)) * up[i]
