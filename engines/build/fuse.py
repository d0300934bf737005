"""Rewrites of a Program: fewer, larger Ops with the same result. Each is a function Program -> Program with a test.

    stack_linears   q, k, v (and gate, up) that read the same rows on the same grids -> one Linear and a Split
    fuse_rope_kv    Split [+ two HeadNorms] + two Ropes + KVWrite -> RopeKV on the stacked rows
    fuse_silu       Split + SiluMul -> GatedSilu on the stacked rows
    fuse_add_norm   Add + RMSNorm -> AddNorm
    fuse_quantize   a norm or GatedSilu whose only reader is a Quantize -> it quantizes itself

Stacking needs equal weight *grids*, not equal scales: a per-tensor weight scale becomes a per-channel one when packed.
Linears whose activations were calibrated to different scales read different values, so they never stack: a fusion that
changes a number does not happen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from calib.scheme import Frozen
from engines.program import (
    Add,
    AddNorm,
    GatedSilu,
    HeadNorm,
    HeadNorms,
    KVWrite,
    Linear,
    Op,
    Program,
    Quantize,
    RMSNorm,
    Rope,
    RopeKV,
    SiluMul,
    Split,
)


class FusionStep(Frozen):
    """What one rewrite did, for ``inspect --plan``."""

    rewrite: str
    ops_before: int
    ops_after: int


def _joined(parts: Sequence[Linear]) -> list[Op]:
    first = parts[0]
    if len(parts) == 1:
        return [first]
    out = "+".join(part.out for part in parts)
    stacked = first.model_copy(update={"parts": tuple(name for part in parts for name in part.parts),
                                       "rows": tuple(part.n for part in parts), "out": out})
    return [stacked, Split(x=out, widths=tuple(part.n for part in parts), outs=tuple(part.out for part in parts))]


def _stackable(a: Linear, b: Linear) -> bool:
    return (a.x, a.weight, a.activation, a.order, a.bias, a.k) == (b.x, b.weight, b.activation, b.order, b.bias, b.k)


def stack_linears(program: Program) -> Program:
    """Consecutive Linears over the same rows and grids become one Linear and a Split."""
    ops: list[Op] = []
    run: list[Linear] = []
    for op in program.ops:
        if run and not (isinstance(op, Linear) and _stackable(run[0], op)):
            ops += _joined(run)
            run = []
        if isinstance(op, Linear):
            run.append(op)
        else:
            ops.append(op)
    return Program(ops=(*ops, *(_joined(run) if run else ())))


def fuse_rope_kv(program: Program) -> Program:
    """[Split(q, k, v), Rope(q), Rope(k), KVWrite] -> RopeKV; HeadNorms of q and k before the Ropes go into it."""
    ops: list[Op] = []
    rest = list(program.ops)
    while rest:
        match rest[:6]:
            case [Split() as split, Rope() as q, Rope() as k, KVWrite() as write, *_] if (
                    split.outs == (q.x, k.x, write.v) and write.k == k.out):
                ops.append(_rope_kv(split, q, write, None))
                del rest[:4]
            case [Split() as split, HeadNorm() as q_norm, HeadNorm() as k_norm, Rope() as q, Rope() as k,
                  KVWrite() as write] if (split.outs == (q_norm.x, k_norm.x, write.v) and write.k == k.out
                                          and (q.x, k.x) == (q_norm.out, k_norm.out)):
                ops.append(_rope_kv(split, q, write, HeadNorms(q=q_norm.weight, k=k_norm.weight, eps=q_norm.eps,
                                                               offset=q_norm.offset)))
                del rest[:6]
            case _:
                ops.append(rest.pop(0))
    return Program(ops=tuple(ops))


def _rope_kv(split: Split, q: Rope, write: KVWrite, norms: HeadNorms | None) -> RopeKV:
    return RopeKV(qkv=split.x, layer=write.layer, heads=q.heads, kv_heads=write.kv_heads, head_dim=write.head_dim,
                  local=q.local, norms=norms, out=q.out)


def fuse_silu(program: Program) -> Program:
    """[Split(gate, up), SiluMul(gate, up)] -> GatedSilu."""
    ops: list[Op] = []
    for op in program.ops:
        last = ops[-1] if ops else None
        if isinstance(op, SiluMul) and isinstance(last, Split) and last.outs == (op.gate, op.up):
            ops[-1] = GatedSilu(gate_up=last.x, width=last.widths[0], activation=op.activation, out=op.out)
        else:
            ops.append(op)
    return Program(ops=tuple(ops))


def fuse_add_norm(program: Program) -> Program:
    """[Add, RMSNorm of the sum] -> AddNorm, which still gives the sum as the next residual."""
    ops: list[Op] = []
    for op in program.ops:
        last = ops[-1] if ops else None
        if isinstance(op, RMSNorm) and isinstance(last, Add) and last.out == op.x:
            ops[-1] = AddNorm(x=last.a, residual=last.b, weight=op.weight, eps=op.eps, offset=op.offset,
                              quant=op.quant, residual_out=last.out, out=op.out)
        else:
            ops.append(op)
    return Program(ops=tuple(ops))


def fuse_quantize(program: Program) -> Program:
    """A producer read by one Quantize alone quantizes its own rows."""
    consumers = program.consumers()
    ops: list[Op] = []
    for op in program.ops:
        last = ops[-1] if ops else None
        if (isinstance(op, Quantize) and isinstance(last, RMSNorm | AddNorm | GatedSilu) and last.out == op.x
                and last.quant is None and len(consumers[op.x]) == 1):
            ops[-1] = last.model_copy(update={"quant": op.quant, "out": op.out})
        else:
            ops.append(op)
    return Program(ops=tuple(ops))


#: All rewrites, in the order in which they apply.
REWRITES: tuple[Callable[[Program], Program], ...] = (stack_linears, fuse_rope_kv, fuse_silu, fuse_add_norm,
                                                      fuse_quantize)


def fuse(program: Program) -> tuple[Program, tuple[FusionStep, ...]]:
    """Apply every rewrite once; returns the fused program and what each rewrite did."""
    steps = []
    for rewrite in REWRITES:
        before = len(program.ops)
        program = rewrite(program)
        program.check()
        steps.append(FusionStep(rewrite=rewrite.__name__, ops_before=before, ops_after=len(program.ops)))
    return program, tuple(steps)
