"""Whether the compiled CPU backend can run a Program, and whether it is the faster one for its linears.

A KernelTable names ``tiles`` for every linear or for none: one compiled step has no place for torch's operators.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engines.kernels.cpu.native.grids import NAME, scaled_rows
from engines.program import (
    Add,
    AddNorm,
    Attention,
    Embed,
    GatedSilu,
    Linear,
    Program,
    Quantize,
    RMSNorm,
    RopeKV,
    SelectRows,
    SoftCap,
    linear_shape,
)

_COMPILED = (Embed, RMSNorm, AddNorm, Quantize, Linear, RopeKV, Attention, GatedSilu, SelectRows, SoftCap, Add)


def refuses(program: Program) -> str | None:
    """None if the compiled backend can run a program on this processor, otherwise the reason in words."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return "needs a processor with AVX2"
    for op in program.ops:
        if not isinstance(op, _COMPILED):
            return f"has no compiled form of {op.op}, which only an unfused program has"
        if isinstance(op, Attention) and op.head_dim % 16:
            return f"needs a head_dim that is a multiple of 16, not {op.head_dim}"
    for name, readers in program.consumers().items():
        if len({scaled_rows(op.weight, op.activation) for op in readers if isinstance(op, Linear)}) > 1:
            return f"has one form of quantized rows a value; {name} is read by linears of two kinds"
    return None


def faster(program: Program, milliseconds: Mapping[str, Mapping[str, Mapping[int, float]]],
           others: Mapping[str, str], steps: Mapping[int, float]) -> bool:
    """Whether tiles win: over step sizes, weighted, the sum of all linears' times against the others' best.

    ``milliseconds`` by shape, operator and step size; ``others`` names the best other operator of a shape. What is not
    timed here, everything between the linears, is where the compiled step gains most.
    """
    score = 0.0
    for step, weight in steps.items():
        tiles = sum(milliseconds[linear_shape(op)][NAME][step] for op in program.linears())
        other = sum(milliseconds[linear_shape(op)][others[linear_shape(op)]][step] for op in program.linears())
        score += weight * (tiles / other - 1.0)
    return score <= 0.0
