"""The one decoder program, and what a family must say to get it.

    x = embed(token)
    for every layer:   x = x + o_proj(attention(rope(q), rope(k), v))        with q, k, v of norm(x)
                       x = x + down_proj(silu(gate_proj(h)) * up_proj(h))    with h = norm(x)
    logits = lm_head(norm(x))

A family is a function from config.json to ``ModelFacts``; the program follows from the facts. Quantized activations
are explicit Ops here: linears that read the same rows through the same ActQuant share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from calib.scheme import Frozen, Scheme
from engines.errors import EngineError
from engines.program import (
    ActQuant,
    Add,
    Attention,
    Embed,
    KVWrite,
    Linear,
    Op,
    Program,
    Quantize,
    RMSNorm,
    Rope,
    SelectRows,
    SiluMul,
)


class RopeFacts(Frozen):
    """Rotary frequencies. ``kind`` default, linear (positions / factor) or llama3 (long wavelengths / factor)."""

    kind: Literal["default", "linear", "llama3"] = "default"
    theta: float = Field(gt=0)
    factor: float = Field(default=1.0, gt=0)
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


class ModelFacts(Frozen):
    """Everything about an architecture that the program, the plan and the runner need."""

    family: str
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    norm_eps: float = Field(gt=0)
    rope: RopeFacts
    max_position: int = Field(gt=0)
    tied_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


#: Module -> key over the *contents* of its activation scales: equal keys, equal values (see build/weights.py).
ActivationKeys = Mapping[str, str]


def rope_facts(config: Mapping[str, Any], supported: tuple[str, ...] = ("default", "linear", "llama3")) -> RopeFacts:
    """Read either layout of rope settings (``rope_parameters``, or ``rope_theta`` with ``rope_scaling``)."""
    section = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(section.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = section.get("rope_type", section.get("type", "default"))
    if kind not in supported:
        raise EngineError(f"rope type {kind!r} is not supported", f"Supported: {', '.join(supported)}.")
    partial = section.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise EngineError(f"partial_rotary_factor {partial} is not supported", "Only whole heads are rotated.")
    if kind == "default":
        return RopeFacts(theta=theta)
    if kind == "linear":
        return RopeFacts(kind="linear", theta=theta, factor=section["factor"])
    return RopeFacts(kind="llama3", theta=theta, factor=section["factor"], low_freq_factor=section["low_freq_factor"],
                     high_freq_factor=section["high_freq_factor"],
                     original_max_position=section["original_max_position_embeddings"])


class _Emitter:
    """Collects Ops; shares one Quantize among linears that read equal codes of the same rows."""

    def __init__(self, schemes: Mapping[str, Scheme], keys: ActivationKeys) -> None:
        self.ops: list[Op] = []
        self._schemes, self._keys = schemes, keys
        self._quantized: dict[tuple[str, str], str] = {}

    def add(self, op: Op) -> None:
        self.ops.append(op)

    def norm(self, x: str, module: str, eps: float, out: str) -> str:
        self.add(RMSNorm(x=x, weight=module, eps=eps, out=out))
        return out

    def linear(self, x: str, module: str, n: int, k: int, bias: bool, out: str) -> str:
        scheme = self._schemes.get(module, Scheme())
        self.add(Linear(x=self._activation(x, module, scheme), parts=(module,), rows=(n,), k=k, weight=scheme.weight,
                        activation=scheme.activation, bias=bias, out=out))
        return out

    def _activation(self, x: str, module: str, scheme: Scheme) -> str:
        static = scheme.activation is not None and not scheme.activation.dynamic
        quant = ActQuant(grid=scheme.activation, input_scale=f"{module}.input_scale" if static else None,
                         pre_quant_scale=f"{module}.pre_quant_scale" if scheme.pre_quant_scale else None)
        if quant == ActQuant():
            return x
        place = (x, self._keys.get(module, module))
        if place not in self._quantized:
            self._quantized[place] = f"{module}.input"
            self.add(Quantize(x=x, quant=quant, out=self._quantized[place]))
        return self._quantized[place]


def decoder_program(facts: ModelFacts, schemes: Mapping[str, Scheme], keys: ActivationKeys) -> Program:
    """The unfused program. ``schemes`` by module (absent: bf16), ``keys`` as in ``ActivationKeys``."""
    emit = _Emitter(schemes, keys)
    emit.add(Embed(weight="model.embed_tokens", out="embed"))
    x = "embed"
    for layer in range(facts.num_layers):
        x = _attention_block(emit, facts, layer, x)
        x = _mlp_block(emit, facts, layer, x)
    emit.add(SelectRows(x=x, out="selected"))
    h = emit.norm("selected", "model.norm", facts.norm_eps, "final")
    tied = facts.tied_embeddings and "lm_head" not in schemes
    if "model.embed_tokens" in schemes:
        raise EngineError(f"the embedding is quantized ({schemes['model.embed_tokens'].weight})",
                          "Embeddings stay unquantized; quantize lm_head instead.")
    head = "model.embed_tokens" if tied else "lm_head"
    emit.linear(h, head, facts.vocab_size, facts.hidden_size, False, "logits")
    program = Program(ops=tuple(emit.ops))
    program.check()
    return program


def _attention_block(emit: _Emitter, facts: ModelFacts, layer: int, x: str) -> str:
    base, at = f"model.layers.{layer}.self_attn", f"L{layer}"
    heads, kv_heads, dim = facts.num_heads, facts.num_kv_heads, facts.head_dim
    h = emit.norm(x, f"model.layers.{layer}.input_layernorm", facts.norm_eps, f"{at}.attn_in")
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        emit.linear(h, f"{base}.{name}_proj", count * dim, facts.hidden_size, facts.attention_bias, f"{at}.{name}")
    emit.add(Rope(x=f"{at}.q", heads=heads, head_dim=dim, out=f"{at}.q_rot"))
    emit.add(Rope(x=f"{at}.k", heads=kv_heads, head_dim=dim, out=f"{at}.k_rot"))
    emit.add(KVWrite(k=f"{at}.k_rot", v=f"{at}.v", layer=layer, kv_heads=kv_heads, head_dim=dim))
    emit.add(Attention(q=f"{at}.q_rot", layer=layer, heads=heads, kv_heads=kv_heads, head_dim=dim, out=f"{at}.attn"))
    o = emit.linear(f"{at}.attn", f"{base}.o_proj", facts.hidden_size, heads * dim, facts.attention_bias, f"{at}.o")
    emit.add(Add(a=o, b=x, out=f"{at}.mid"))
    return f"{at}.mid"


def _mlp_block(emit: _Emitter, facts: ModelFacts, layer: int, x: str) -> str:
    base, at = f"model.layers.{layer}.mlp", f"L{layer}"
    h = emit.norm(x, f"model.layers.{layer}.post_attention_layernorm", facts.norm_eps, f"{at}.mlp_in")
    width = facts.intermediate_size
    for name in ("gate", "up"):
        emit.linear(h, f"{base}.{name}_proj", width, facts.hidden_size, facts.mlp_bias, f"{at}.{name}")
    emit.add(SiluMul(gate=f"{at}.gate", up=f"{at}.up", out=f"{at}.act"))
    down = emit.linear(f"{at}.act", f"{base}.down_proj", facts.hidden_size, width, facts.mlp_bias, f"{at}.down")
    emit.add(Add(a=down, b=x, out=f"{at}.end"))
    return f"{at}.end"
