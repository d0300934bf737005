"""The PTX of the 4-bit matrix kernel, written out by small functions: widen, multiply, scale.

Each text is one ``inline_asm_elementwise`` with ``pack=4``: an operand that is a tensor of 4 elements a lane appears as
four registers in a row. Numbers: outputs first, then inputs, in the order of the call.
"""

from __future__ import annotations

from triton.runtime.jit import constexpr_function

__all__ = ["mma_asm", "mma_registers", "scaled_asm", "scaled_registers", "widen_asm", "widen_registers"]


@constexpr_function
def widen_asm(half: int, a8: bool, fp16: bool) -> str:
    """Words 2 half and 2 half + 1 of a lane's four -> operand A for the 32 inputs they hold."""
    if a8:
        return _widen_int8(2 * half)
    return _widen_fp16(2 * half) if fp16 else _widen_bf16(2 * half)


@constexpr_function
def widen_registers(a8: bool) -> str:
    """A8 makes one fragment of four registers, A16 two."""
    return ",".join(["=&r"] * (4 if a8 else 8) + ["r"] * 4)


@constexpr_function
def mma_asm(x_half: int, a8: bool, fp16: bool) -> str:
    """Sum $0-3 = fragment $4-7 times activations (words 2 x_half, 2 x_half + 1 of $8-11) + sum $12-15."""
    pair = "f16" if fp16 else "bf16"
    kind = "m16n8k32.row.col.s32.s8.s8.s32" if a8 else f"m16n8k16.row.col.f32.{pair}.{pair}.f32"
    return (f"mma.sync.aligned.{kind} {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, "
            f"{{${8 + 2 * x_half}, ${9 + 2 * x_half}}}, {{$12, $13, $14, $15}};")


@constexpr_function
def mma_registers(a8: bool) -> str:
    return ",".join([f"={'r' if a8 else 'f'}"] * 4 + ["r"] * 8 + ["r" if a8 else "f"] * 4)


@constexpr_function
def scaled_asm(group: int, scale: int, a8: bool) -> str:
    """Sum $0-3 = $4-7 + group sum $8-11 times the two rows' scales, which lie in $12-15 for several groups.

    ``scale``: 0 bf16, 1 fp16 (word ``group`` is the pair), 2 fp32 (two words). A8: the group sum is an int32; $16-19
    and $20-23 are the activation scales of the lane's two tokens by group. Registers 0, 1 are row r, 2, 3 row r + 8.
    """
    text = "{ .reg .f32 r, s, a, b; .reg .b16 l, h; .reg .b32 t;\n"
    if scale == 0:
        text += f"shl.b32 t, ${12 + group}, 16; mov.b32 r, t; and.b32 t, ${12 + group}, 0xffff0000; mov.b32 s, t;\n"
    elif scale == 1:
        text += f"mov.b32 {{l, h}}, ${12 + group}; cvt.f32.f16 r, l; cvt.f32.f16 s, h;\n"
    else:
        text += f"mov.b32 r, ${12 + 2 * (group % 2)}; mov.b32 s, ${13 + 2 * (group % 2)};\n"
    for i in range(4):
        row = "r" if i < 2 else "s"
        if a8:
            text += f"cvt.rn.f32.s32 a, ${8 + i}; mul.f32 b, {row}, ${16 + 4 * (i % 2) + group}; "
            text += f"fma.rn.f32 ${i}, a, b, ${4 + i};\n"
        else:
            text += f"fma.rn.f32 ${i}, ${8 + i}, {row}, ${4 + i};\n"
    return text + "}"


@constexpr_function
def scaled_registers(a8: bool) -> str:
    inputs = ["f"] * 4 + ["r"] * 8 + ["f"] * 8 if a8 else ["f"] * 8 + ["r"] * 4
    return ",".join(["=&f"] * 4 + inputs)


@constexpr_function
def _widen_bf16(first: int) -> str:
    """bf16 has 7 fraction bits: 0x4300 | u is 128 + u, for a nibble u = q + 8 shifted to the bottom; minus 136 is q."""
    text = "{ .reg .b32 t, v, m, o, b; mov.b32 m, 0x43004300; mov.b32 o, 0x3F803F80; mov.b32 b, 0xC308C308;\n"
    for i in range(2):
        for j in range(4):
            word = f"${8 + first + i}"
            text += f"shr.u32 v, {word}, {4 * j}; lop3.b32 t, v, 0x000f000f, m, 0xea; "
            text += f"fma.rn.bf16x2 ${4 * i + j}, t, o, b;\n"
    return text + "}"


@constexpr_function
def _widen_fp16(first: int) -> str:
    """fp16 has 10: 0x6400 | u is 1024 + u, 0x6400 | 16 u is 1024 + 16 u (times 1/16 minus 72 is q): one shift of 8."""
    text = "{ .reg .b32 t, v, m, o, b, p, d; mov.b32 m, 0x64006400; mov.b32 o, 0x3C003C00; mov.b32 b, 0xE408E408;\n"
    text += "mov.b32 p, 0x2C002C00; mov.b32 d, 0xD480D480;\n"
    for i in range(2):
        text += f"shr.u32 v, ${8 + first + i}, 8;\n"
        for j in range(4):
            source = f"${8 + first + i}" if j < 2 else "v"
            mask, scale, minus = ("0x00f000f0", "p", "d") if j % 2 else ("0x000f000f", "o", "b")
            text += f"lop3.b32 t, {source}, {mask}, m, 0xea; fma.rn.f16x2 ${4 * i + j}, t, {scale}, {minus};\n"
    return text + "}"


@constexpr_function
def _widen_int8(first: int) -> str:
    """Four low nibbles, then four high ones, of each word as int8 numbers 16 q."""
    return "{ .reg .b32 t;\n" + "".join(
        f"shl.b32 t, ${4 + first + i}, 4; and.b32 ${2 * i}, t, 0xf0f0f0f0; "
        f"and.b32 ${2 * i + 1}, ${4 + first + i}, 0xf0f0f0f0;\n" for i in range(2)) + "}"
