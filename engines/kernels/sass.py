"""Reads a kernel's machine code (SASS of sm_90) for one fault: registers written while a product still reads them.

Hopper's warpgroup products (``HGMMA``, ``QGMMA``, ``IGMMA``) run on their own. Where the first operand stands in
registers, those may not be written before a wait has found the product done (PTX ISA, ``wgmma.wait_group``): products
up to one marked ``gsb0`` are a group, and ``WARPGROUP.DEPBAR.LE gsb0, n`` leaves at most the n youngest groups under
way. In a loop the next turn's operand may be written too early (``jit.settled`` says when); whether sums are then wrong
is a matter of timing, so no run on a card shows that they are right.

The code is followed along its branches: of every product that may be under way at an instruction, it is known how many
groups have been closed since at least.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_REGISTER = re.compile(r"R(\d+)(?:\.\w+)*")
_PREDICATE = re.compile(r"!?U?P[T\d]")
_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")
#: What they name first is read, or is no register of a thread's own.
_NO_TARGET = {"ST", "STG", "STS", "STL", "STSM", "RED", "BAR", "BRA", "WARPGROUP", "LDGSTS", "SYNCS", "MEMBAR", "FENCE",
              "EXIT", "NOP", "ISETP", "FSETP", "HSETP2", "DSETP", "PLOP3", "R2UR", "R2P", "CCTL", "ERRBAR", "LDGDEPBAR",
              "DEPBAR", "BSSY", "BSYNC", "WARPSYNC", "ACQBULK", "PREEXIT", "NANOSLEEP", "ELECT"}
_OPERAND = 4  # registers of a product's first operand, whatever its type


@dataclass(frozen=True, slots=True)
class Instruction:
    """``at``: its address; ``guarded``: it has a predicate; ``op``: its mnemonic; ``rest``: its operands."""

    at: int
    guarded: bool
    op: str
    rest: str

    @property
    def base(self) -> str:
        return self.op.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.at:#x} {self.op} {self.rest}"


def instructions(text: str) -> list[Instruction]:
    """What ``cuobjdump -sass`` printed."""
    return [Instruction(int(at, 16), bool(guard), op, rest.strip()) for at, guard, op, rest in _LINE.findall(text)]


def overwritten(code: Sequence[Instruction]) -> list[str]:
    """Instructions that write a register which a product under way may still read, and which product. ValueError for a
    branch whose aim is not written in it, in code with products."""
    if not any(one.base in _PRODUCTS for one in code):
        return []
    follow = _successors(code)
    # of each place: products that may be under way -> groups closed since, at least
    known: list[dict[int, int] | None] = [{}] + [None] * (len(code) - 1)
    open_places = [0]
    while open_places:
        place = open_places.pop()
        after = _after(code, place, known[place] or {})
        for following in follow[place]:
            before = known[following]
            joined = after if before is None else {product: min(after.get(product, age), before.get(product, age))
                                                   for product, age in (after | before).items()}
            if joined != before:
                known[following] = joined
                open_places.append(following)
    return [f"{one} while {code[product].at:#x} runs" for one, under_way in zip(code, known, strict=True)
            for product in under_way or {} if set(_targets(one)) & set(_operand(code[product]))]


def _successors(code: Sequence[Instruction]) -> list[list[int]]:
    place = {one.at: index for index, one in enumerate(code)}
    found = []
    for index, one in enumerate(code):
        aims, goes_on = [], True
        if one.base == "BRA":
            aim = re.search(r"0x([0-9a-f]+)\s*$", one.rest)
            if aim is None or int(aim[1], 16) not in place:
                raise ValueError(f"a branch to nowhere known: {one}")
            aims, goes_on = [place[int(aim[1], 16)]], one.guarded or one.op != "BRA" or "P" in one.rest
        elif one.base in ("BRX", "JMP", "JMX", "CALL"):
            raise ValueError(f"a branch to nowhere known: {one}")
        elif one.base in ("EXIT", "RET"):
            goes_on = one.guarded
        found.append([*aims, *([index + 1] if goes_on and index + 1 < len(code) else [])])
    return found


def _after(code: Sequence[Instruction], place: int, under_way: dict[int, int]) -> dict[int, int]:
    """Products under way behind an instruction: -1 until their group is closed, then how many were closed since."""
    one = code[place]
    if one.op.startswith("WARPGROUP.DEPBAR") and not one.guarded:
        left = int(one.rest.rpartition("0x")[2], 16)
        return {product: age for product, age in under_way.items() if age < left}
    if one.base in _PRODUCTS:
        found = under_way | {place: -1}
        return {product: age + 1 for product, age in found.items()} if "gsb0" in one.rest else found
    return under_way


def _operand(product: Instruction) -> range:
    """Registers of a product's first operand; none where it stands in shared memory."""
    register = _REGISTER.fullmatch(product.rest.split(",")[1].strip())
    return range(int(register[1]), int(register[1]) + _OPERAND) if register else range(0)


def _targets(one: Instruction) -> range:
    """Registers that an instruction writes: its first operand that is no predicate."""
    if one.base in _NO_TARGET or one.base.startswith("U"):
        return range(0)
    for operand in one.rest.split(","):
        register = _REGISTER.fullmatch(operand.strip())
        if register:
            return range(int(register[1]), int(register[1]) + _width(one))
        if not _PREDICATE.fullmatch(operand.strip()):
            break
    return range(0)


def _width(one: Instruction) -> int:
    if one.base in _PRODUCTS:  # 64 rows by n columns on 128 threads; 16-bit sums take half
        columns = int(one.op.split(".")[1].split("x")[1])
        return columns // 2 if ".F32." in f"{one.op}." or one.base == "IGMMA" else columns // 4
    if matrices := re.search(r"MT?88\.(\d)", one.op):  # LDSM
        return int(matrices[1])
    if ".128" in one.op or one.base == "IMMA" or (one.base == "HMMA" and ".F32" in one.op):
        return 4
    wide = one.base in ("DADD", "DMUL", "DFMA", "HMMA") or (one.base == "CS2R" and ".32" not in one.op)
    if one.base == "SHF":  # of a pair, but one register
        return 1
    return 2 if wide or any(word in one.op for word in (".64", "WIDE", ".F64", ".S64", ".U64")) else 1
