"""Reads a kernel's machine code (SASS of sm_90) for one fault: registers written while a product still reads them.

Hopper's warpgroup products (``HGMMA``, ``QGMMA``, ``IGMMA``) run on their own. Where the first operand stands in
registers, those may not be written before a ``WARPGROUP.DEPBAR.LE gsb0, n`` has left at most n younger products under
way (PTX ISA, ``wgmma.wait_group``). In a loop the next turn's operand may be written too early (``jit.settled`` says
when); whether sums are then wrong is a matter of timing, so no run on a card shows that they are right.

Bounds: straight loops only, walked through twice; a branch inside one is taken for its whole body.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_REGISTER = re.compile(r"R(\d+)(?:\.reuse)?")
_PREDICATE = re.compile(r"!?U?P[T\d]")
_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")
#: Their registers are all read, or none is a register of a thread's own.
_NO_TARGET = {"ST", "STG", "STS", "STL", "RED", "BAR", "BRA", "WARPGROUP", "LDGSTS", "SYNCS", "MEMBAR", "FENCE", "EXIT",
              "NOP", "ISETP", "FSETP", "PLOP3", "R2UR", "CCTL", "ERRBAR", "LDGDEPBAR", "DEPBAR", "BSYNC", "WARPSYNC",
              "ACQBULK", "PREEXIT"}
Instruction = tuple[int, str, str]
"""Address, mnemonic, operands."""


def instructions(text: str) -> list[Instruction]:
    """What ``cuobjdump -sass`` printed."""
    return [(int(at, 16), op, rest) for at, op, rest in _LINE.findall(text)]


def overwritten(code: Sequence[Instruction]) -> list[str]:
    """Instructions in loops that write a register which a product under way may still read, and which product."""
    place = {at: index for index, (at, _, _) in enumerate(code)}
    found: list[str] = []
    for index, (at, op, rest) in enumerate(code):
        target = None if op != "BRA" else re.search(r"0x([0-9a-f]+)", rest)
        if target is not None and int(target[1], 16) < at:
            found += _walk([*code[place[int(target[1], 16)]:index + 1]] * 2)
    return list(dict.fromkeys(found))


def _walk(code: Sequence[Instruction]) -> Iterator[str]:
    """``overwritten`` of a straight piece."""
    under_way: list[tuple[int, range]] = []
    for at, op, rest in code:
        if op.startswith("WARPGROUP.DEPBAR"):
            left = int(rest.rpartition("0x")[2], 16)
            under_way = under_way[max(0, len(under_way) - left):]
        elif op.startswith(_PRODUCTS):
            operand = _REGISTER.fullmatch(rest.split(",")[1].strip())
            first = int(operand[1]) if operand else 0
            under_way.append((at, range(first, first + 4 if operand else first)))
        else:
            for register in _targets(op, rest):
                yield from (f"{at:#x} {op} {rest.strip()} while {product:#x} runs"
                            for product, its in under_way if register in its)


def _targets(op: str, rest: str) -> range:
    """Registers that an instruction writes: its first operand that is no predicate."""
    if op.partition(".")[0] in _NO_TARGET or op.startswith("U"):
        return range(0)
    for operand in rest.split(","):
        register = _REGISTER.fullmatch(operand.strip())
        if register:
            return range(int(register[1]), int(register[1]) + _width(op))
        if not _PREDICATE.fullmatch(operand.strip()):
            break
    return range(0)


def _width(op: str) -> int:
    matrices = re.search(r"MT?88\.(\d)", op)  # LDSM
    return int(matrices[1]) if matrices else 4 if ".128" in op else 2 if ".64" in op or "WIDE" in op else 1
