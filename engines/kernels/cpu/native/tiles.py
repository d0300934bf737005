"""Weights in tiles of sixteen outputs, and their products with rows.

``Tiles.of`` turns a weight's disk form into the layout of one kernel (``micro`` draws them), outputs padded to whole
tiles with zeros; every tile begins on a cache line.

    kind        weights                                     x          y =
    INT8        symmetric int8, one scale a channel         int16      exact sum * channel scale * row scale
    INT8_WIDE   symmetric int8, groups or channels          float32    sum over groups of scale * sum, * row scale
    FP8         e4m3, blocks, groups or channels            float32    the same
    INT4        symmetric int4 groups of a multiple of 8    float32    the same
    INT4_ZERO   int4 with zeros                             float32    the same, of codes less their zero
    INT4_INDEX  int4, columns sorted by group (g_idx)       float32    the same, x in the columns' order
    BF16        every number a bf16 one                     float32    sum * channel scale * row scale
    FLOAT       anything else, dequantized                  float32    the same

A weight scale that several outputs share is repeated for each; a channel is one group of k inputs. Codes stay in 8 or 4
bits in memory and are widened in registers.

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
from engines.kernels.cpu.native.grids import group_size, integer_rows, packs_nibbles
from engines.kernels.cpu.native.ir import floats
from engines.kernels.cpu.native.micro import TILE

Array = np.ndarray[Any, Any]


class Kind(IntEnum):
    """The layout of a weight."""

    BF16, FLOAT, INT8, INT4, INT4_ZERO, INT4_INDEX, INT8_WIDE, FP8 = range(8)


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
    """A packed weight. ``count``, ``pitch`` and ``total`` are the kernel's; ``scale`` [tiles * 16] and ``bias`` or
    None; ``group_scales`` bytes [tiles, groups, 64 or 80]; ``index`` int32 [k]."""

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
    total: int = 0
    index: Array | None = None

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
        if (grouped := _grouped(stored, n, k)) is not None:
            kind, data, scales, index = grouped
            unit = 8 if grid.dtype == "int4" else 1
            size = group_size(grid) or k
            return cls(kind, n, k, data, data[0].nbytes, scales.shape[1], size // unit, scales, None, bias, k // unit,
                       index)
        weight, scale = stored.values()
        lanes = None if scale is None else _lanes(scale.reshape(-1).expand(n), n)
        values = _whole_tiles(np.ascontiguousarray(weight.numpy()), n)
        exact = not (values.view(np.uint32) & 0xFFFF).any()
        data = _bf16(values) if exact else _input_by_input(values)
        return cls(Kind.BF16 if exact else Kind.FLOAT, n, k, data, data[0].nbytes, k, 4 * TILE, None, lanes, bias)

    @property
    def tiles(self) -> int:
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        parts = (self.data, self.group_scales, self.scale, self.bias, self.index)
        return sum(part.nbytes for part in parts if part is not None)


def _grouped(stored: Stored, n: int, k: int) -> tuple[Kind, Array, Array, Array | None] | None:
    """(kind, codes, scales and zeros, columns) of a weight that keeps its 8 or 4 bits; None where it cannot."""
    grid = stored.grid
    if stored.scale is None:
        return None
    scale = stored.scale.float()
    scales = scale if scale.dim() == 2 else scale.reshape(-1, 1).expand(n, 1)
    if grid.dtype == "int4":
        return _nibbles(stored, scales, n) if packs_nibbles(grid, k) else None
    if stored.zero is not None or stored.g_idx is not None:
        return None
    data = _input_by_input(_whole_tiles(stored.codes.view(torch.int8).numpy(), n))
    if grid.dtype == "fp8_e4m3":
        return Kind.FP8, data, _group_scales(scales * 256, None, n), None
    return Kind.INT8_WIDE, data, _group_scales(scales, None, n), None


def _nibbles(stored: Stored, scales: torch.Tensor, n: int) -> tuple[Kind, Array, Array, Array | None] | None:
    """An int4 weight in the order of its groups; asymmetric codes and zeros are lowered by 8, to be signed."""
    codes = stored.int4_codes()
    columns: torch.Tensor | None = None
    if stored.g_idx is not None:
        columns = sorted_columns(stored.g_idx, group_size(stored.grid))
        if columns is None:
            return None
        codes = codes[:, columns]
    lowered = 0 if stored.grid.symmetric else 8
    data = _int4(_whole_tiles((codes - lowered).contiguous().numpy(), n))
    if columns is None and stored.zero is None:
        return Kind.INT4, data, _group_scales(scales, None, n), None
    zero = torch.zeros(scales.shape, dtype=torch.int8)
    if stored.zero is not None:
        zero = (stored.zero - lowered).to(torch.int8).reshape(-1, scales.shape[1]).expand(scales.shape)
    lanes = _group_scales(scales, zero, n)
    if columns is None:
        return Kind.INT4_ZERO, data, lanes, None
    return Kind.INT4_INDEX, data, lanes, _laid((4 * columns).to(torch.int32).numpy())


def sorted_columns(g_idx: torch.Tensor, size: int) -> torch.Tensor | None:
    """Columns in the order of their groups, int64 [k]; None where a group but the last has not ``size`` of them."""
    groups = g_idx.long()
    if size == 0 or not torch.equal(groups.sort().values, torch.arange(groups.numel()) // size):
        return None
    return groups.argsort(stable=True)


def _group_scales(scales: torch.Tensor, zeros: torch.Tensor | None, n: int) -> Array:
    """float32 [n, groups] (and int8 zeros) -> bytes [tiles, groups, 64 or 80]."""
    def lanes(matrix: torch.Tensor) -> Array:
        whole = _whole_tiles(matrix.contiguous().numpy(), n)
        return np.ascontiguousarray(whole.reshape(-1, TILE, whole.shape[1]).transpose(0, 2, 1)).view(np.uint8)
    parts = [lanes(scales)] if zeros is None else [lanes(scales), lanes(zeros)]
    return _laid(np.concatenate(parts, 2))


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


def _input_by_input(matrix: Array) -> Array:
    """float32 or int8 codes [n, k] -> [tiles, k, 16]."""
    return _laid(matrix.reshape(-1, TILE, matrix.shape[1]).transpose(0, 2, 1))


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
    def run(w: int, x: int, row_bytes: int, out: int, out_bytes: int, count: int, pitch: int, scales: int, rows: int,
            total: int = 0, index: int = 0) -> None:
        while rows >= 4:
            four(w, x, row_bytes, out, out_bytes, count, pitch, scales, total, index)
            x += 4 * row_bytes
            out += 4 * out_bytes
            rows -= 4
        if rows == 3:
            three(w, x, row_bytes, out, out_bytes, count, pitch, scales, total, index)
        elif rows == 2:
            two(w, x, row_bytes, out, out_bytes, count, pitch, scales, total, index)
        elif rows == 1:
            one(w, x, row_bytes, out, out_bytes, count, pitch, scales, total, index)
    return run


_rows_bf16, _rows_int8 = over_rows(micro.BF16), over_rows(micro.INT8)
_rows_wide, _rows_fp8 = over_rows(micro.INT8_WIDE), over_rows(micro.FP8)
_rows_int4, _rows_zero, _rows_index = (over_rows(each) for each in (micro.INT4, micro.INT4_ZERO, micro.INT4_INDEX))
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
def _multiply_groups(kind: int, w: int, x: int, row_bytes: int, out: int, out_bytes: int, count: int, pitch: int,
                     scales: int, rows: int, total: int, index: int) -> None:
    """One tile of a kind with group scales."""
    if kind == 3:
        _rows_int4(w, x, row_bytes, out, out_bytes, count, pitch, scales, rows, total, index)
    elif kind == 4:
        _rows_zero(w, x, row_bytes, out, out_bytes, count, pitch, scales, rows, total, index)
    elif kind == 5:
        _rows_index(w, x, row_bytes, out, out_bytes, count, pitch, scales, rows, total, index)
    elif kind == 6:
        _rows_wide(w, x, row_bytes, out, out_bytes, count, pitch, scales, rows, total, index)
    else:
        _rows_fp8(w, x, row_bytes, out, out_bytes, count, pitch, scales, rows, total, index)


@njit(nogil=True, error_model="numpy")
def multiply(kind: int, w: int, tile_bytes: int, count: int, pitch: int, total: int, group_scales: int, index: int,
             scale: int, bias: int, x: int, row_bytes: int, row_scales: int, out: int, out_bytes: int, rows: int,
             first: int, last: int) -> None:
    """Tiles first to last of out [rows, tiles * 16] = x times a packed weight. Addresses and byte counts; 0 is none."""
    scale_bytes = 80 if kind == 4 or kind == 5 else 64
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
            _multiply_groups(kind, at, x, row_bytes, to, out_bytes, count, pitch,
                             group_scales + tile * count * scale_bytes, rows, total, index)
        if scale != 0 or row_scales != 0 or bias != 0:
            _finish(to, out_bytes, rows, tile, scale, row_scales, bias)
