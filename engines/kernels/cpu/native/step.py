"""The walk over a step's table of Ops, run by every thread of a team at once.

An Op is a row of int64 (``Field``) and a row of float64 (``Real``): addresses, sizes, constants. A step's own numbers
come in ``Context``. Threads share each Op: tiles of a linear, tokens of row-wise work, units of attention; after each
Op they meet at a barrier. A waiting thread spins, then offers its processor.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum, auto
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import register_jitable

from engines.kernels.cpu.native.attend import attention, rope_kv
from engines.kernels.cpu.native.ir import fetch_add, floats, halves, load_acquire, pause, store_release, words
from engines.kernels.cpu.native.norms import add_row, cap_row, gelu_row, norm_row, quantize_row, silu_row
from engines.kernels.cpu.native.tiles import multiply

_SPINS = 4000
_yield = types.ExternalFunction("sched_yield", types.int32())


class Code(IntEnum):
    """What an Op does."""

    EMBED_BF16, EMBED_F32, NORM, ADD_NORM, QUANTIZE, LINEAR, ROPE_KV, ATTENTION, SILU, SELECT, ADD = range(11)
    GELU, SOFT_CAP = 11, 12


class Field(IntEnum):
    """Columns of the int64 table. Buffers are (address, bytes of a row); N is a width, K an input width."""

    CODE = 0
    X, X_BYTES, X_SCALES = auto(), auto(), auto()
    OUT, OUT_BYTES, OUT_SCALES = auto(), auto(), auto()
    RESIDUAL, RESIDUAL_BYTES, SUM, SUM_BYTES = auto(), auto(), auto(), auto()
    N, WEIGHT, CODING, GROUP, MULTIPLIER = (auto() for _ in range(5))
    KIND, TILES, TILE_BYTES, COUNT, PITCH, TOTAL, GROUP_SCALES, INDEX, SCALE, BIAS = (auto() for _ in range(10))
    HEADS, KV_HEADS, DIM, CACHE, FORM, KV_SCALES, COS, SIN = (auto() for _ in range(8))
    ROTARY, Q_NORM, K_NORM, WINDOW = (auto() for _ in range(4))


class Real(IntEnum):
    """Columns of the float64 table."""

    EPS, STATIC_SCALE, FACTOR, SOFTCAP = range(4)


class Context(IntEnum):
    """A step's numbers: counts, and addresses of int64 arrays."""

    ROWS, TOKENS, POSITIONS, SLOTS, WANTED, WANTED_ROWS = range(6)
    SEQUENCES, NEWS, LENGTHS, TABLES, TABLE_WIDTH = range(6, 11)
    BLOCK_SIZE, CODES, SCRATCH, SCRATCH_BYTES, LONGEST = range(11, 16)


def _plain(columns: type[IntEnum]) -> tuple[int, ...]:
    return tuple(int(column) for column in columns)


@register_jitable
def _share(count: int, rank: int, size: int) -> tuple[int, int]:
    return count * rank // size, count * (rank + 1) // size


@njit(nogil=True, error_model="numpy")
def barrier(sync: int, size: int) -> None:
    """All ``size`` threads arrive before any goes on. ``sync``: three int64 on cache lines of their own.

    The third counts the work that is handed out in an Op; the last to arrive sets it back.
    """
    if size == 1:
        return
    turn = load_acquire(sync + 64)
    if fetch_add(sync, 1) == size - 1:
        store_release(sync, 0)
        store_release(sync + 128, 0)
        store_release(sync + 64, turn + 1)
        return
    spins = 0
    while load_acquire(sync + 64) == turn:
        pause()
        spins += 1
        if spins > _SPINS:
            _yield()


(_CODE, _X, _X_BYTES, _X_SCALES, _OUT, _OUT_BYTES, _OUT_SCALES, _RESIDUAL, _RESIDUAL_BYTES, _SUM, _SUM_BYTES, _N,
 _WEIGHT, _CODING, _GROUP, _MULTIPLIER, _KIND, _TILES, _TILE_BYTES, _COUNT, _PITCH, _TOTAL, _GROUP_SCALES, _INDEX,
 _SCALE, _BIAS, _HEADS, _KV_HEADS, _DIM, _CACHE, _FORM, _KV_SCALES, _COS, _SIN, _ROTARY, _Q_NORM, _K_NORM,
 _WINDOW) = _plain(Field)
(_ROWS, _TOKENS, _POSITIONS, _SLOTS, _WANTED, _WANTED_ROWS, _SEQUENCES, _NEWS, _LENGTHS, _TABLES, _TABLE_WIDTH,
 _BLOCK_SIZE, _CODES, _SCRATCH, _SCRATCH_BYTES, _LONGEST) = _plain(Context)
_EPS, _STATIC, _FACTOR, _SOFTCAP = _plain(Real)


@njit(nogil=True, error_model="numpy")
def _embed(op: Any, real: Any, tokens: int, rows: int, rank: int, size: int) -> None:
    n, factor = op[_N], np.float32(real[_FACTOR])
    first, last = _share(rows, rank, size)
    for r in range(first, last):
        token = words(tokens, rows)[r]
        y = floats(op[_OUT] + r * op[_OUT_BYTES], n)
        if op[_CODE] == 0:
            bits = halves(op[_WEIGHT] + token * n * 2, n)
            raw = y.view(np.uint32)
            for i in range(n):
                raw[i] = np.uint32(bits[i]) << np.uint32(16)
        else:
            y[:] = floats(op[_WEIGHT] + token * n * 4, n)
        if factor != np.float32(1.0):
            for i in range(n):
                y[i] *= factor


@njit(nogil=True, error_model="numpy")
def _row_op(op: Any, real: Any, scratch: int, rows: int, rank: int, size: int) -> None:
    """Norms, quantization, gated activations and caps: everything that makes one row from one row."""
    n, code, coding = op[_N], op[_CODE], op[_CODING]
    first, last = _share(rows, rank, size)
    for r in range(first, last):
        x = floats(op[_X] + r * op[_X_BYTES], 2 * n if code == 8 or code == 11 else n)
        out = op[_OUT] + r * op[_OUT_BYTES]
        y = floats(scratch if coding == 1 or coding == 2 else out, n)
        if code == 10:
            add_row(x, floats(op[_RESIDUAL] + r * op[_RESIDUAL_BYTES], n), y)
        elif code == 3:
            total = floats(op[_SUM] + r * op[_SUM_BYTES], n)
            add_row(x, floats(op[_RESIDUAL] + r * op[_RESIDUAL_BYTES], n), total)
            norm_row(total, floats(op[_WEIGHT], n), real[_EPS], y)
        elif code == 2:
            norm_row(x, floats(op[_WEIGHT], n), real[_EPS], y)
        elif code == 8:
            silu_row(x[:n], x[n:], y)
        elif code == 11:
            gelu_row(x[:n], x[n:], y)
        elif code == 12:
            cap_row(x, real[_SOFTCAP], y)
        else:
            y[:] = x
        quantize_row(y, coding, real[_STATIC], op[_MULTIPLIER], out, op[_OUT_SCALES] + r * 4, op[_GROUP])


@njit(nogil=True, error_model="numpy")
def _select(op: Any, wanted: int, count: int, rank: int, size: int) -> None:
    first, last = _share(count, rank, size)
    for r in range(first, last):
        source = words(wanted, count)[r]
        floats(op[_OUT] + r * op[_OUT_BYTES], op[_N])[:] = floats(op[_X] + source * op[_X_BYTES], op[_N])


@njit(nogil=True, error_model="numpy")
def _linear(op: Any, rows: int, sync: int, size: int) -> None:
    """Tiles go to whoever is free, an eighth of a fair share at a time: a thread that was interrupted holds up few."""
    tiles = op[_TILES]
    chunk = tiles if size == 1 else max(1, tiles // (8 * size))
    first = 0 if size == 1 else fetch_add(sync + 128, chunk)
    while first < tiles:
        multiply(op[_KIND], op[_WEIGHT], op[_TILE_BYTES], op[_COUNT], op[_PITCH], op[_TOTAL], op[_GROUP_SCALES],
                 op[_INDEX], op[_SCALE], op[_BIAS], op[_X], op[_X_BYTES], op[_X_SCALES], op[_OUT], op[_OUT_BYTES], rows,
                 first, min(first + chunk, tiles))
        if size == 1:
            return
        first = fetch_add(sync + 128, chunk)


def _walk(rank: int, size: int, sync: int, first: int, last: int, ops: Any, reals: Any, context: Any) -> None:
    """Ops first to last, as thread ``rank`` of ``size``. Every thread calls this with the same other arguments."""
    rows = context[_ROWS]
    scratch = context[_SCRATCH] + rank * context[_SCRATCH_BYTES]
    for index in range(first, last):
        op, real = ops[index], reals[index]
        code = op[_CODE]
        if code == 5:
            _linear(op, rows, sync, size)
        elif code == 6:
            rope_kv(op[_X], op[_X_BYTES], op[_OUT], op[_OUT_BYTES], op[_HEADS], op[_KV_HEADS], op[_DIM], op[_COS],
                    op[_SIN], op[_ROTARY], op[_Q_NORM], op[_K_NORM], real[_EPS], context[_POSITIONS], context[_SLOTS],
                    op[_CACHE], context[_BLOCK_SIZE], op[_FORM], op[_KV_SCALES], rows, rank, size)
        elif code == 7:
            attention(op[_X], op[_X_BYTES], op[_OUT], op[_OUT_BYTES], op[_HEADS], op[_KV_HEADS], op[_DIM], op[_CACHE],
                      op[_FORM] == 1, op[_KV_SCALES], op[_WINDOW], real[_FACTOR], real[_SOFTCAP],
                      context[_BLOCK_SIZE], context[_CODES],
                      context[_SEQUENCES], context[_NEWS], context[_LENGTHS], context[_TABLES], context[_TABLE_WIDTH],
                      scratch, context[_LONGEST], rank, size)
        elif code <= 1:
            _embed(op, real, context[_TOKENS], rows, rank, size)
        elif code == 9:
            rows = context[_WANTED_ROWS]
            _select(op, context[_WANTED], rows, rank, size)
        else:
            _row_op(op, real, scratch, rows, rank, size)
        barrier(sync, size)


def _stamp() -> str:
    """The content of this folder's sources.

    Numba keys its cache by the file of the function alone: with a changed kernel beside an unchanged walk it would run
    the old code. The name of the function is in the key too, so the sources go there.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:16]


_walk.__qualname__ = f"walk_{_stamp()}"
run = njit("void(int64, int64, int64, int64, int64, int64[:, ::1], float64[:, ::1], int64[::1])", nogil=True,
           cache=True, error_model="numpy")(_walk)
