"""Matrix kernels of up to four rows by sixteen outputs, as LLVM vector code for AVX2 (and what includes it).

``tile kernels`` y[r, 0:16] = sum over k of x[r, k] * w[k, 0:16], r < ROWS: the outputs of a tile are two vectors of
eight lanes, an input is broadcast to all lanes, and the sums stay in 2 * ROWS registers. No sum crosses lanes, so
its order is k's, always. Layouts of a tile (``tiles`` packs them):

    bf16   [k] of 32 bytes: lane j of a word holds output j in its low and output 8 + j in its high half; a shift and a
           mask make two float32 vectors
    f32    [k] of 16 floats, ``pitch`` bytes apart: also a cache's values, as they lie
    int8   [k/2] of 32 bytes: two vectors of 8 outputs x 2 inputs; widened to int16, multiplied and added in pairs to
           int32 (pmaddwd: exact, 127 * 127 * 2 fits), by int16 codes of x
    byte   [k] of 16 bytes: byte j holds output j, an int8 or an e4m3 code. e4m3 becomes fp16 by a shift (the exponent's
           bias differs by 8: the scales make up for 2^-8) and float32 by the processor's own conversion
    int4   [k/8] of 64 bytes: lane j of two vectors of int32 holds 8 inputs of output j (8 + j), first input lowest

Groups (byte, int4): ``count`` groups of ``pitch`` inputs (int4: of 8 inputs), the last one ends with ``total`` inputs.
A group's sum is multiplied by ``scales`` [groups] of 16 floats and added; one group is a scale a row. ``zero`` kernels
find 16 int8 zeros after a group's 16 floats, and subtract them from its codes; ``index`` kernels take input i of the
weight from x at ``index[i]`` (int32, bytes), for weights whose columns were sorted by group.

Order within k: bf16 and f32 one multiply-add an input; int8 exact; groups one multiply-add an input within a group, one
a group.

``dot kernel`` s[r, t] = sum over d of q[r, d] * k[t, d], r < ROWS, two t at a time: lanes run along d (a multiple of
8), and are added pairwise, halves first, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from engines.kernels.cpu.native.ir import F32, I8, I16, I32, I64, intrinsic

F32x8, I32x8 = ir.VectorType(F32, 8), ir.VectorType(I32, 8)
I8x16, I16x16 = ir.VectorType(I8, 16), ir.VectorType(I16, 16)
I8x8, I16x8, F16x8 = ir.VectorType(I8, 8), ir.VectorType(I16, 8), ir.VectorType(ir.HalfType(), 8)
#: Rows that one kernel takes; more rows are several calls.
MOST_ROWS = 4
TILE = 16


class Emit:
    """A few vector idioms over an LLVM builder."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context, self.b = context, builder
        module = builder.module
        self._fma = cgutils.get_or_insert_function(module, ir.FunctionType(F32x8, [F32x8] * 3), "llvm.fma.v8f32")
        self._madd = cgutils.get_or_insert_function(
            module, ir.FunctionType(I32x8, [I16x16, I16x16]), "llvm.x86.avx2.pmadd.wd")

    @staticmethod
    def number(value: int) -> Any:
        return ir.Constant(I64, value)

    def plus(self, address: Any, offset: Any) -> Any:
        return self.b.add(address, self.number(offset) if isinstance(offset, int) else offset)

    def times(self, value: Any, by: int) -> Any:
        return self.b.mul(value, self.number(by))

    def load(self, address: Any, kind: Any, align: int = 4) -> Any:
        value = self.b.load(self.b.inttoptr(address, kind.as_pointer()), typ=kind)
        value.align = align
        return value

    def store(self, value: Any, address: Any) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer())).align = 4

    def broadcast(self, address: Any, kind: Any) -> Any:
        """One number from memory in all eight lanes."""
        scalar = self.load(address, kind)
        vector = ir.VectorType(kind, 8)
        single = self.b.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(single, ir.Constant(vector, ir.Undefined),
                                     ir.Constant(ir.VectorType(I32, 8), [0] * 8))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.b.call(self._fma, [a, b, c])

    def madd(self, a: Any, b: Any) -> Any:
        return self.b.call(self._madd, [a, b])

    def cells(self, rows: int, kind: Any, columns: int = 2) -> list[list[Any]]:
        """Zeroed accumulators; LLVM keeps them in registers."""
        zero = ir.Constant(kind, [0] * 8) if kind is I32x8 else ir.Constant(kind, [0.0] * 8)
        return [[cgutils.alloca_once_value(self.b, zero) for _ in range(columns)] for _ in range(rows)]

    def least(self, a: Any, b: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    def loop(self, count: Any) -> Any:
        return cgutils.for_range(self.b, count, intp=I64)

    def lower_lanes(self, vector: Any) -> Any:
        """The eight lanes' sum."""
        for width in (4, 2, 1):
            kind = ir.VectorType(I32, width)
            low = self.b.shuffle_vector(vector, vector, ir.Constant(kind, list(range(width))))
            high = self.b.shuffle_vector(vector, vector, ir.Constant(kind, list(range(width, 2 * width))))
            vector = self.b.fadd(low, high)
        return self.b.extract_element(vector, ir.Constant(I32, 0))


Body = Callable[[Emit, int, Sequence[Any]], None]


def _kernel(body: Body, rows: int) -> Any:
    """An intrinsic of that many rows; all its arguments are int64: w, x, its row bytes, out, its row bytes, count,
    pitch, scales, total, index."""
    @intrinsic
    def kernel(typing: Any, w: Any, x: Any, row_bytes: Any, out: Any, out_bytes: Any, count: Any, pitch: Any,
               scales: Any, total: Any, index: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            body(Emit(context, builder), rows, args)
            return context.get_dummy_value()
        return types.void(*[types.int64] * 10), code
    return kernel


def _bf16(e: Emit, rows: int, args: Sequence[Any]) -> None:
    w, x, row_bytes, out, out_bytes, k, *_ = args
    sums = e.cells(rows, F32x8)
    with e.loop(k) as loop:
        pair = e.load(e.plus(w, e.times(loop.index, 32)), I32x8, 32)
        low = e.b.bitcast(e.b.shl(pair, ir.Constant(I32x8, [16] * 8)), F32x8)
        high = e.b.bitcast(e.b.and_(pair, ir.Constant(I32x8, [-65536] * 8)), F32x8)
        _accumulate(e, sums, x, row_bytes, e.times(loop.index, 4), (low, high))
    _write(e, sums, out, out_bytes)


def _f32(e: Emit, rows: int, args: Sequence[Any]) -> None:
    """Adds to what ``out`` holds: attention goes through values block by block."""
    w, x, row_bytes, out, out_bytes, k, pitch, *_ = args
    sums = e.cells(rows, F32x8)
    for i in range(rows):
        for j in range(2):
            e.b.store(e.load(_place(e, out, out_bytes, i, j), F32x8), sums[i][j])
    with e.loop(k) as loop:
        at = e.plus(w, e.b.mul(loop.index, pitch))
        weights = [e.load(e.plus(at, 32 * j), F32x8) for j in range(2)]
        _accumulate(e, sums, x, row_bytes, e.times(loop.index, 4), weights)
    _write(e, sums, out, out_bytes)


def _int8(e: Emit, rows: int, args: Sequence[Any]) -> None:
    w, x, row_bytes, out, out_bytes, pairs, *_ = args
    sums = e.cells(rows, I32x8)
    with e.loop(pairs) as loop:
        at = e.plus(w, e.times(loop.index, 32))
        weights = [e.b.sext(e.load(e.plus(at, 16 * j), I8x16, 16), I16x16) for j in range(2)]
        for i in range(rows):
            codes = e.plus(e.plus(x, e.times(row_bytes, i)), e.times(loop.index, 4))
            pair = e.b.bitcast(e.broadcast(codes, I32), I16x16)
            for j in range(2):
                e.b.store(e.b.add(e.madd(pair, weights[j]), e.b.load(sums[i][j])), sums[i][j])
    for i in range(rows):
        for j in range(2):
            e.store(e.b.sitofp(e.b.load(sums[i][j]), F32x8), _place(e, out, out_bytes, i, j))


def _from_int8(e: Emit, codes: Any) -> Any:
    return e.b.sitofp(e.b.sext(codes, I32x8), F32x8)


def _from_e4m3(e: Emit, codes: Any) -> Any:
    """The numbers times 2^-8."""
    bits = e.b.shl(e.b.sext(codes, I16x8), ir.Constant(I16x8, [7] * 8))
    return e.b.fpext(e.b.bitcast(e.b.and_(bits, ir.Constant(I16x8, [-16512] * 8)), F16x8), F32x8)  # 0xBF80


def _grouped(e: Emit, rows: int, args: Sequence[Any], scale_bytes: int,
             inputs: Callable[[Any, list[list[Any]], Any], None]) -> None:
    """The loop over groups. ``inputs`` adds one unit of a group, given where its scales are."""
    _, _, _, out, out_bytes, groups, size, scales, total, _ = args
    sums = e.cells(rows, F32x8)
    with e.loop(groups) as group:
        within = e.cells(rows, F32x8)
        first = e.b.mul(group.index, size)
        at = e.plus(scales, e.times(group.index, scale_bytes))
        with e.loop(e.least(size, e.b.sub(total, first))) as loop:
            inputs(e.b.add(first, loop.index), within, at)
        scale = [e.load(e.plus(at, 32 * j), F32x8) for j in range(2)]
        for i in range(rows):
            for j in range(2):
                e.b.store(e.fma(e.b.load(within[i][j]), scale[j], e.b.load(sums[i][j])), sums[i][j])
    _write(e, sums, out, out_bytes)


def _byte(widen: Callable[[Emit, Any], Any]) -> Body:
    """Eight bits a weight; the unit is one input."""
    def body(e: Emit, rows: int, args: Sequence[Any]) -> None:
        w, x, row_bytes, *_ = args

        def inputs(k: Any, within: list[list[Any]], _: Any) -> None:
            at = e.plus(w, e.times(k, 16))
            weights = [widen(e, e.load(e.plus(at, 8 * j), I8x8, 8)) for j in range(2)]
            _accumulate(e, within, x, row_bytes, e.times(k, 4), weights)
        _grouped(e, rows, args, 64, inputs)
    return body


def _int4(zero: bool = False, index: bool = False) -> Body:
    """Four bits a weight; the unit is a word of eight inputs."""
    def body(e: Emit, rows: int, args: Sequence[Any]) -> None:
        w, x, row_bytes, *_, columns = args

        def inputs(word: Any, within: list[list[Any]], scales: Any) -> None:
            at = e.plus(w, e.times(word, 64))
            packed = [e.load(e.plus(at, 32 * j), I32x8, 32) for j in range(2)]
            zeros = [_from_int8(e, e.load(e.plus(scales, 64 + 8 * j), I8x8, 1)) for j in range(2)] if zero else None
            for step in range(8):
                up, down = ir.Constant(I32x8, [28 - 4 * step] * 8), ir.Constant(I32x8, [28] * 8)
                codes = [e.b.sitofp(e.b.ashr(e.b.shl(vector, up), down), F32x8) for vector in packed]
                if zeros is not None:
                    codes = [e.b.fsub(code, its) for code, its in zip(codes, zeros, strict=True)]
                offset = e.plus(e.times(word, 32), 4 * step)
                if index:
                    offset = e.b.zext(e.load(e.plus(columns, offset), I32), I64)
                _accumulate(e, within, x, row_bytes, offset, codes)
        _grouped(e, rows, args, 80 if zero else 64, inputs)
    return body


def _accumulate(e: Emit, sums: list[list[Any]], x: Any, row_bytes: Any, offset: Any, weights: Sequence[Any]) -> None:
    for i, row in enumerate(sums):
        value = e.broadcast(e.plus(e.plus(x, e.times(row_bytes, i)), offset), F32)
        for cell, weight in zip(row, weights, strict=True):
            e.b.store(e.fma(value, weight, e.b.load(cell)), cell)


def _place(e: Emit, out: Any, out_bytes: Any, row: int, half: int) -> Any:
    return e.plus(e.plus(out, e.times(out_bytes, row)), 32 * half)


def _write(e: Emit, sums: list[list[Any]], out: Any, out_bytes: Any) -> None:
    for i, row in enumerate(sums):
        for j, cell in enumerate(row):
            e.store(e.b.load(cell), _place(e, out, out_bytes, i, j))


def _dots(e: Emit, rows: int, args: Sequence[Any]) -> None:
    keys, q, row_bytes, out, out_bytes, eights, pitch, *_ = args
    sums = e.cells(rows, F32x8)
    with e.loop(eights) as loop:
        offset = e.times(loop.index, 32)
        vectors = [e.load(e.plus(e.plus(keys, e.times(pitch, t)), offset), F32x8) for t in range(2)]
        for i in range(rows):
            value = e.load(e.plus(e.plus(q, e.times(row_bytes, i)), offset), F32x8)
            for t in range(2):
                e.b.store(e.fma(value, vectors[t], e.b.load(sums[i][t])), sums[i][t])
    for i in range(rows):
        for t in range(2):
            e.store(e.lower_lanes(e.b.load(sums[i][t])), e.plus(e.plus(out, e.times(out_bytes, i)), 4 * t))


def _family(body: Body) -> tuple[Any, ...]:
    """The kernels of 1 to ``MOST_ROWS`` rows."""
    return tuple(_kernel(body, rows) for rows in range(1, MOST_ROWS + 1))


BF16, FLOAT, INT8, DOTS = (_family(body) for body in (_bf16, _f32, _int8, _dots))
INT8_WIDE, FP8 = _family(_byte(_from_int8)), _family(_byte(_from_e4m3))
INT4, INT4_ZERO, INT4_INDEX = (_family(_int4(*flags)) for flags in ((False, False), (True, False), (True, True)))
