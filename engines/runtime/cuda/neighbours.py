"""Which Ops of a Program are bound together, and which norms are fences: read off the Ops alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engines.program import (
    ActQuant,
    AddNorm,
    Attention,
    GatedSilu,
    HeadNorms,
    Linear,
    Op,
    Quantize,
    RMSNorm,
    RopeKV,
    reads,
)


def kind_of(op: Op) -> str:
    """An Op without its names: what decides which kernel variants it launches."""
    def plain(value: object) -> object:
        if isinstance(value, ActQuant):
            return f"{value.grid} {value.input_scale is None} {value.pre_quant_scale is None}"
        if isinstance(value, HeadNorms):
            return f"head norms {value.eps} {value.offset}"
        return "" if isinstance(value, str) else value
    fields = {name: plain(getattr(op, name)) for name in type(op).model_fields if name not in ("op", "layer", "parts")}
    return f"{op.op} {fields}"


def fences(ops: Sequence[Op]) -> dict[str, str]:
    """Norms that a qkv linear reads directly: the norm's output -> the qkv rows that a RoPE takes from there."""
    norms = {op.out for op in ops if isinstance(op, RMSNorm | AddNorm)}
    rotated = {op.qkv for op in ops if isinstance(op, RopeKV)}
    return {op.x: op.out for op in ops if isinstance(op, Linear) and op.x in norms and op.out in rotated}


def following_linears(ops: Sequence[Op]) -> dict[str, list[Linear]]:
    """An attention's output -> the two linears that run next (the output projection and gate_up, in a decoder)."""
    return {op.out: [later for later in ops[at:] if isinstance(later, Linear)][:2]
            for at, op in enumerate(ops) if isinstance(op, Attention)}


@dataclass(frozen=True, slots=True)
class Group:
    """An Op, and what it takes in beside itself: an attention RoPE and quantization, a linear its activation."""

    op: Op
    rope: RopeKV | None = None
    quant: Quantize | None = None
    silu: GatedSilu | None = None


def attention_groups(ops: Sequence[Op]) -> Iterator[Group]:
    """Each Op, together with those neighbours that only concern it."""
    readers: dict[str, int] = {}
    for op in ops:
        for name in reads(op):
            readers[name] = readers.get(name, 0) + 1
    rest = list(ops)
    while rest:
        op = rest.pop(0)
        rope: RopeKV | None = None
        quant: Quantize | None = None
        if isinstance(op, RopeKV) and rest and isinstance(rest[0], Attention) and (
                rest[0].q == op.out and readers[op.out] == 1):
            rope, op = op, rest.pop(0)
        if isinstance(op, Attention) and rest and isinstance(rest[0], Quantize) and (
                rest[0].x == op.out and readers[op.out] == 1):
            quant = rest.pop(0)  # type: ignore[assignment]
        silu = rest[0] if rest and isinstance(op, Linear) else None
        if isinstance(op, Linear) and isinstance(silu, GatedSilu) and silu.gate_up == op.out and readers[op.out] == 1:
            rest.pop(0)
            yield Group(op, silu=silu)
        else:
            yield Group(op, rope, quant)
