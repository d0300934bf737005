"""The operation map: a model as a tuple of typed Ops over named values.

A model family emits an *unfused* Program: every Op does one thing, as a textbook would write it. ``build/fuse.py``
rewrites it into fewer, larger Ops with the same result; the Plan stores the fused one; the runner binds each Op to the
operator that the KernelTable names. A Program says *what* is computed, for any device; *how* is never in it.

Values are named strings, each written once. Kinds of value:

    rows         [tokens, width] in the compute dtype
    quantized    rows as codes with their scales, made by an ActQuant (how they lie in memory is the device's matter)
    logits       [selected rows, vocabulary]

The KV cache of a layer is not a value: ``KVWrite``, ``RopeKV`` and ``Attention`` address it by layer number.
Weights are named by module (``model.layers.0.self_attn.q_proj``), as in the canonical stream of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from calib.scheme import BF16, Frozen, Grid


class ActQuant(Frozen):
    """What happens to rows before a linear: y = x * pre_quant_scale, then codes on ``grid``.

    ``input_scale`` and ``pre_quant_scale`` name tensors; ``grid`` None leaves y in the compute dtype.
    """

    grid: Grid | None = None
    input_scale: str | None = None
    pre_quant_scale: str | None = None

    def __str__(self) -> str:
        parts = (["pre_quant_scale"] if self.pre_quant_scale else []) + ([str(self.grid)] if self.grid else [])
        return "+".join(parts)


class Embed(Frozen):
    """out[t] = weight[token[t]] * scale."""

    op: Literal["embed"] = "embed"
    weight: str
    scale: float = 1.0
    out: str


class RMSNorm(Frozen):
    """out = x / sqrt(mean(x^2) + eps) * (weight + offset), then ``quant``."""

    op: Literal["rms_norm"] = "rms_norm"
    x: str
    weight: str
    eps: float
    offset: float = 0.0
    quant: ActQuant | None = None
    out: str


class Quantize(Frozen):
    """out = x through ``quant``."""

    op: Literal["quantize"] = "quantize"
    x: str
    quant: ActQuant
    out: str


class Linear(Frozen):
    """out [t, n] = x [t, k] times the stacked weights of ``parts`` transposed (+ their biases).

    ``rows`` are the parts' own row counts. ``activation`` is the grid that x arrives on. ``order`` names the contents
    of the weight's g_idx: linears of different orders are never stacked.
    """

    op: Literal["linear"] = "linear"
    x: str
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    k: int
    weight: Grid = BF16
    activation: Grid | None = None
    order: str | None = None
    bias: bool = False
    out: str

    @property
    def n(self) -> int:
        return sum(self.rows)


def linear_shape(op: Linear) -> str:
    """The key of a linear in the KernelTable and in the tuning cache."""
    order = "" if op.order is None else " act_order"
    return f"n={op.n} k={op.k} weight={op.weight}{order} activation={op.activation or '16-bit'}"


class Split(Frozen):
    """outs = x cut along its width at ``widths``."""

    op: Literal["split"] = "split"
    x: str
    widths: tuple[int, ...]
    outs: tuple[str, ...]


class HeadNorm(Frozen):
    """RMSNorm of every head of x [t, heads * head_dim] by itself, with one weight [head_dim] (+ offset)."""

    op: Literal["head_norm"] = "head_norm"
    x: str
    weight: str
    eps: float
    offset: float = 0.0
    heads: int
    head_dim: int
    out: str


class Rope(Frozen):
    """Rotary position embedding of x [t, heads * head_dim], pairs (i, i + d / 2) of a head's first d dimensions.

    The frequencies are the model's, or those of its layers with a window (``local``).
    """

    op: Literal["rope"] = "rope"
    x: str
    heads: int
    head_dim: int
    local: bool = False
    out: str


class KVWrite(Frozen):
    """Store k and v [t, kv_heads * head_dim] into the layer's cache at the batch's slots."""

    op: Literal["kv_write"] = "kv_write"
    k: str
    v: str
    layer: int
    kv_heads: int
    head_dim: int


class Attention(Frozen):
    """Causal attention of q [t, heads * head_dim] over each sequence's cached keys and values.

    softmax(cap(q k * scale)) v over the last ``window`` tokens (0: all), the own one among them; ``scale`` None is
    1 / sqrt(head_dim), cap(s) = softcap * tanh(s / softcap), or s without.
    """

    op: Literal["attention"] = "attention"
    q: str
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float | None = None
    scale: float | None = None
    out: str

    @property
    def factor(self) -> float:
        """What q k is multiplied by."""
        return self.head_dim ** -0.5 if self.scale is None else self.scale


class SiluMul(Frozen):
    """out = activation(gate) * up; silu (gate * sigmoid(gate)) where nothing else is said."""

    op: Literal["silu_mul"] = "silu_mul"
    gate: str
    up: str
    activation: Literal["silu", "gelu_tanh"] = "silu"
    out: str


class Add(Frozen):
    """out = a + b."""

    op: Literal["add"] = "add"
    a: str
    b: str
    out: str


class SelectRows(Frozen):
    """out = the rows of x whose logits are wanted. All that follows is the head."""

    op: Literal["select_rows"] = "select_rows"
    x: str
    out: str


class SoftCap(Frozen):
    """out = cap * tanh(x / cap)."""

    op: Literal["soft_cap"] = "soft_cap"
    x: str
    cap: float
    out: str


class AddNorm(Frozen):
    """Fused: residual_out = x + residual; out = RMSNorm(residual_out), then ``quant``."""

    op: Literal["add_norm"] = "add_norm"
    x: str
    residual: str
    weight: str
    eps: float
    offset: float = 0.0
    quant: ActQuant | None = None
    residual_out: str
    out: str


class HeadNorms(Frozen):
    """The HeadNorms of q and k inside a RopeKV."""

    q: str
    k: str
    eps: float
    offset: float = 0.0


class RopeKV(Frozen):
    """Fused: from a stacked qkv [t, (heads + 2 kv_heads) * head_dim], [normalise and] rotate q and k, store k and v,
    give q."""

    op: Literal["rope_kv"] = "rope_kv"
    qkv: str
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    local: bool = False
    norms: HeadNorms | None = None
    out: str


class GatedSilu(Frozen):
    """Fused: from a stacked gate_up [t, 2 * width], activation(gate) * up (as SiluMul), then ``quant``."""

    op: Literal["gated_silu"] = "gated_silu"
    gate_up: str
    width: int
    activation: Literal["silu", "gelu_tanh"] = "silu"
    quant: ActQuant | None = None
    out: str


Op = Annotated[Embed | RMSNorm | Quantize | Linear | Split | HeadNorm | Rope | KVWrite | Attention | SiluMul | Add
               | SelectRows | SoftCap | AddNorm | RopeKV | GatedSilu, Field(discriminator="op")]

_READS = ("x", "q", "k", "v", "a", "b", "gate", "up", "residual", "qkv", "gate_up")
_WRITES = ("residual_out", "out")


def reads(op: Op) -> tuple[str, ...]:
    """Names of the values that an Op reads. (A Linear's ``k`` is a number, not a value.)"""
    return tuple(value for name in _READS if isinstance(value := getattr(op, name, None), str))


def writes(op: Op) -> tuple[str, ...]:
    """Names of the values that an Op writes."""
    if isinstance(op, Split):
        return op.outs
    return tuple(value for name in _WRITES if (value := getattr(op, name, None)) is not None)


class Program(Frozen):
    """Ops in order of execution. The last one gives the logits."""

    ops: tuple[Op, ...]

    def __iter__(self) -> Iterator[Op]:  # type: ignore[override]
        return iter(self.ops)

    def linears(self) -> tuple[Linear, ...]:
        return tuple(op for op in self.ops if isinstance(op, Linear))

    def consumers(self) -> dict[str, list[Op]]:
        """Value name -> the Ops that read it, in order."""
        found: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in reads(op):
                found.setdefault(name, []).append(op)
        return found

    def check(self) -> None:
        """ValueError unless every value is written once and before it is read."""
        known: set[str] = set()
        for op in self.ops:
            for name in reads(op):
                if name not in known:
                    raise ValueError(f"{op.op} reads {name!r} before it is written")
            for name in writes(op):
                if name in known:
                    raise ValueError(f"{op.op} writes {name!r} a second time")
                known.add(name)
