"""Weights in tiles of sixteen outputs, and their products with rows.

``Tiles.of`` turns a weight's disk form into the layout of one kernel (``micro`` draws them), outputs padded to whole
tiles with zeros; every tile begins on a cache line.

    kind   weights                                          x          y =
    INT8   symmetric int8, one scale a channel or tensor    int16      exact sum * channel scale * row scale
    INT4   symmetric int4 groups of a multiple of 8         float32    sum over groups of scale * sum
    BF16   every number a bf16 one: bf16, fp8, int8 alone   float32    sum * channel scale * row scale
    FLOAT  anything else, dequantized                       float32    the same

A weight tile is read once for four rows at a time and stays in the nearest cache while all rows pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numba import njit

from calib.scheme import Grid
from engines.kernels.cpu.disk import Stored
from engines.kernels.cpu.native import micro
from engines.kernels.cpu.native.grids import integer_rows
from engines.kernels.cpu.native.ir import floats
from engines.kernels.cpu.native.micro import TILE

Array = np.ndarray[Any, Any]


class Kind(IntEnum):
    """The layout of a weight."""

    BF16, FLOAT, INT8, INT4 = range(4)


def aligned(shape: tuple[int, ...], dtype: Any) -> Array:
    """Uninitialised memory that begins on a cache line."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + size].view(dtype).reshape(shape)


def padded(count: int, to: int = TILE) -> int:
    """``count`` rounded up."""
    return -(-count // to) * to


@dataclass(frozen=True, slots=True)
class Tiles:
    """A packed weight. ``count`` and ``pitch`` are the kernel's; ``scale`` [tiles * 16] and ``bias`` or None."""

    kind: Kind
    n: int
    k: int
    data: Array
    tile_bytes: int
    count: int
    pitch: int
    group_scales: Array | None
    scale: Array | None
    bias: Array | None

    @classmethod
    def of(cls, stored: Stored, activation: Grid | None) -> Tiles:
        """Pack a weight for the kernel that suits its grid and its activation's."""
        grid = stored.grid
        n, k = stored.codes.shape[0], stored.codes.shape[1] * (2 if grid.dtype == "int4" else 1)
        bias = _lanes(stored.bias, n)
        if integer_rows(grid, activation):
            data = _int8(_whole_tiles(stored.codes.numpy(), n))
            return cls(Kind.INT8, n, k, data, data[0].nbytes, data.shape[1], 0, None,
                       _lanes(stored.channel_scale(), n), bias)
        if grid.dtype == "int4" and grid.symmetric and grid.granularity.kind == "group" and stored.g_idx is None and (
                grid.granularity.size % 8 == 0 and k % grid.granularity.size == 0):
            data = _int4(_whole_tiles(stored.int4_codes().numpy(), n))
            assert stored.scale is not None
            scales = _whole_tiles(stored.scale.float().numpy(), n).reshape(-1, TILE, stored.scale.shape[1])
            group = np.ascontiguousarray(scales.transpose(0, 2, 1))
            return cls(Kind.INT4, n, k, data, data[0].nbytes, group.shape[1], grid.granularity.size // 8, group, None,
                       bias)
        weight, scale = stored.values()
        lanes = None if scale is None else _lanes(scale.reshape(-1).expand(n), n)
        values = _whole_tiles(np.ascontiguousarray(weight.numpy()), n)
        exact = not (values.view(np.uint32) & 0xFFFF).any()
        data = _bf16(values) if exact else _float(values)
        return cls(Kind.BF16 if exact else Kind.FLOAT, n, k, data, data[0].nbytes, k, 4 * TILE, None, lanes, bias)

    @property
    def tiles(self) -> int:
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return sum(part.nbytes for part in (self.data, self.group_scales, self.scale, self.bias) if part is not None)


def _lanes(vector: torch.Tensor | None, n: int) -> Array | None:
    """A vector of n padded to whole tiles."""
    if vector is None:
        return None
    out = np.zeros(padded(n), np.float32)
    out[:n] = vector.float().numpy()
    return out


def _whole_tiles(matrix: Array, n: int) -> Array:
    """Rows padded with zeros to whole tiles."""
    missing = padded(n) - n
    return np.ascontiguousarray(np.pad(matrix, ((0, missing), (0, 0))) if missing else matrix)


def _laid(view: Array) -> Array:
    out = aligned(view.shape, view.dtype)
    out[...] = view
    return out


def _bf16(values: Array) -> Array:
    """float32 [n, k] of bf16 numbers -> uint32 [tiles, k, 8]."""
    bits = (values.view(np.uint32) >> 16).reshape(-1, 2, 8, values.shape[1])
    return _laid((bits[:, 0] | (bits[:, 1] << 16)).transpose(0, 2, 1))


def _float(values: Array) -> Array:
    """float32 [n, k] -> [tiles, k, 16]."""
    return _laid(values.reshape(-1, TILE, values.shape[1]).transpose(0, 2, 1))


def _int8(codes: Array) -> Array:
    """int8 [n, k] -> [tiles, k/2, 2, 8, 2], an odd k padded with a zero."""
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return _laid(codes.reshape(-1, 2, 8, codes.shape[1] // 2, 2).transpose(0, 3, 1, 2, 4))


def _int4(codes: Array) -> Array:
    """int4 codes in int8 [n, k] -> uint32 [tiles, k/8, 2, 8], eight inputs a word."""
    eights = (codes.reshape(codes.shape[0], -1, 8).astype(np.uint32) & 15) << np.arange(0, 32, 4, dtype=np.uint32)
    words = np.bitwise_or.reduce(eights, 2)
    return _laid(words.reshape(-1, 2, 8, words.shape[1]).transpose(0, 3, 1, 2))


def over_rows(family: tuple[Any, ...]) -> Any:
    """A compiled function that takes any number of rows through a family of kernels."""
    one, two, three, four = family

    @njit(nogil=True, error_model="numpy")
    def run(w: int, x: int, row_bytes: int, out: int, out_bytes: int, count: int, pitch: int, scales: int, rows: int
            ) -> None:
        while rows >= 4:
            four(w, x, row_bytes, out, out_bytes, count, pitch, scales)
            x += 4 * row_bytes
            out += 4 * out_bytes
            rows -= 4
        if rows == 3:
            three(w, x, row_bytes, out, out_bytes, count, pitch, scales)
        elif rows == 2:
            two(w, x, row_bytes, out, out_bytes, count, pitch, scales)
        elif rows == 1:
            one(w, x, row_bytes, out, out_bytes, count, pitch, scales)
    return run


_rows_bf16, _rows_int8, _rows_int4 = over_rows(micro.BF16), over_rows(micro.INT8), over_rows(micro.INT4)
rows_float = over_rows(micro.FLOAT)


@njit(nogil=True, error_model="numpy")
def _finish(out: int, out_bytes: int, rows: int, tile: int, scale: int, row_scales: int, bias: int) -> None:
    for r in range(rows):
        y = floats(out + r * out_bytes, 16)
        if scale != 0:
            s = floats(scale + 64 * tile, 16)
            for j in range(16):
                y[j] *= s[j]
        if row_scales != 0:
            by = floats(row_scales, rows)[r]
            for j in range(16):
                y[j] *= by
        if bias != 0:
            b = floats(bias + 64 * tile, 16)
            for j in range(16):
                y[j] += b[j]


@njit(nogil=True, error_model="numpy")
def multiply(kind: int, w: int, tile_bytes: int, count: int, pitch: int, group_scales: int, scale: int, bias: int,
             x: int, row_bytes: int, row_scales: int, out: int, out_bytes: int, rows: int, first: int, last: int
             ) -> None:
    """Tiles first to last of out [rows, tiles * 16] = x times a packed weight. Addresses and byte counts; 0 is none."""
    for tile in range(first, last):
        at, to = w + tile * tile_bytes, out + 64 * tile
        if kind == 0:
            _rows_bf16(at, x, row_bytes, to, out_bytes, count, 0, 0, rows)
        elif kind == 1:
            for r in range(rows):
                floats(to + r * out_bytes, 16)[:] = 0.0
            rows_float(at, x, row_bytes, to, out_bytes, count, pitch, 0, rows)
        elif kind == 2:
            _rows_int8(at, x, row_bytes, to, out_bytes, count, 0, 0, rows)
        else:
            _rows_int4(at, x, row_bytes, to, out_bytes, count, pitch, group_scales + tile * count * 64, rows)
        if scale != 0 or row_scales != 0 or bias != 0:
            _finish(to, out_bytes, rows, tile, scale, row_scales, bias)
