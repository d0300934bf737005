"""What Numba does not offer and LLVM does: memory by address, bits of a float, rounding, atomics, a pause.

Addresses are int64. Numba arrays are made from them by ``floats`` and its kin, which cost nothing at run time.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic

F32, I8, I16 = ir.FloatType(), ir.IntType(8), ir.IntType(16)
I32, I64 = ir.IntType(32), ir.IntType(64)


def intrinsic(function: Any) -> Any:
    """Numba's, without its type: what is called is not what was written (the first parameter is Numba's own)."""
    return numba_intrinsic(function)


def _pointer_to(element: Any) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        result = types.CPointer(element)

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(result))
        return result(types.int64), code
    return pointer


_f32, _i16, _u8 = _pointer_to(types.float32), _pointer_to(types.int16), _pointer_to(types.uint8)
_u16, _i64 = _pointer_to(types.uint16), _pointer_to(types.int64)


@njit(inline="always")
def floats(address: int, count: int) -> Any:
    """float32 [count] at an address."""
    return carray(_f32(address), (count,))


@njit(inline="always")
def shorts(address: int, count: int) -> Any:
    """int16 [count] at an address."""
    return carray(_i16(address), (count,))


@njit(inline="always")
def halves(address: int, count: int) -> Any:
    """uint16 [count] at an address: bf16 bits."""
    return carray(_u16(address), (count,))


@njit(inline="always")
def octets(address: int, count: int) -> Any:
    """uint8 [count] at an address."""
    return carray(_u8(address), (count,))


@njit(inline="always")
def words(address: int, count: int) -> Any:
    """int64 [count] at an address."""
    return carray(_i64(address), (count,))


@intrinsic
def bits_of(typing: Any, value: Any) -> Any:
    """The bits of a float32 as int32."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], I32)
    return types.int32(types.float32), code


@intrinsic
def from_bits(typing: Any, value: Any) -> Any:
    """The float32 of int32 bits."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F32)
    return types.float32(types.int32), code


@intrinsic
def nearest(typing: Any, value: Any) -> Any:
    """A float32 rounded to the nearest integer, ties to even."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(F32, [F32]), "llvm.nearbyint.f32")
        return builder.call(function, args)
    return types.float32(types.float32), code


@intrinsic
def fetch_add(typing: Any, address: Any, value: Any) -> Any:
    """Atomically add to the int64 at an address; what was there before."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "acq_rel")
    return types.int64(types.int64, types.int64), code


@intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    """The int64 at an address; nothing after it is moved before it."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8, typ=I64)
    return types.int64(types.int64), code


@intrinsic
def store_release(typing: Any, address: Any, value: Any) -> Any:
    """Write the int64 at an address; nothing before it is moved after it."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()
    return types.void(types.int64, types.int64), code


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the cache line of an address, to be read soon."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = I8.as_pointer()
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32]), "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(args[0], pointer), ir.Constant(I32, 0), ir.Constant(I32, 3),
                                ir.Constant(I32, 1)])
        return context.get_dummy_value()
    return types.void(types.int64), code


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the processor that this is a waiting loop."""
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []),
                                                  "llvm.x86.sse2.pause")
        builder.call(function, [])
        return context.get_dummy_value()
    return types.void(), code
