"""The one decoder program, and how it follows from a family's facts.

    x = embed(token)
    for every layer:   x = x + o_proj(attention(rope(q), rope(k), v))        with q, k, v of norm(x)
                       x = x + down_proj(silu(gate_proj(h)) * up_proj(h))    with h = norm(x)
    logits = lm_head(norm(x))

A family differs from this by facts (``facts.py``), each of which is an option of an Op or one Op more. Quantized
activations are explicit Ops here: linears that read the same rows through the same ActQuant share one.
"""

from __future__ import annotations

from collections.abc import Mapping

from calib.scheme import Scheme
from engines.errors import EngineError
from engines.models.facts import ModelFacts
from engines.program import (
    ActQuant,
    Add,
    Attention,
    Embed,
    HeadNorm,
    KVWrite,
    Linear,
    Op,
    Program,
    Quantize,
    RMSNorm,
    Rope,
    SelectRows,
    SiluMul,
    SoftCap,
    Split,
)

#: Module -> key over the *contents* of its activation scales: equal keys, equal values (see build/weights.py).
ActivationKeys = Mapping[str, str]


class _Emitter:
    """Collects Ops; shares one Quantize among linears that read equal codes of the same rows."""

    def __init__(self, facts: ModelFacts, schemes: Mapping[str, Scheme], keys: ActivationKeys) -> None:
        self.ops: list[Op] = []
        self._facts, self._schemes, self._keys = facts, schemes, keys
        self._quantized: dict[tuple[str, str], str] = {}

    def add(self, op: Op) -> None:
        self.ops.append(op)

    def norm(self, x: str, module: str, out: str) -> str:
        self.add(RMSNorm(x=x, weight=module, eps=self._facts.norm_eps, offset=self._facts.norm_offset, out=out))
        return out

    def head_norm(self, x: str, module: str, heads: int, out: str) -> str:
        self.add(HeadNorm(x=x, weight=module, eps=self._facts.norm_eps, offset=self._facts.norm_offset, heads=heads,
                          head_dim=self._facts.head_dim, out=out))
        return out

    def fused(self, x: str, module: str, k: int, bias: bool, outs: Mapping[str, int]) -> None:
        """One matrix of the checkpoint for several values."""
        stacked = "+".join(outs)
        self.linear(x, module, sum(outs.values()), k, bias, stacked)
        self.add(Split(x=stacked, widths=tuple(outs.values()), outs=tuple(outs)))

    def linear(self, x: str, module: str, n: int, k: int, bias: bool, out: str) -> str:
        scheme = self._schemes.get(module, Scheme())
        order = self._keys.get(module, module) if scheme.act_order else None
        self.add(Linear(x=self._activation(x, module, scheme), parts=(module,), rows=(n,), k=k, weight=scheme.weight,
                        activation=scheme.activation, order=order, bias=bias, out=out))
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
    emit = _Emitter(facts, schemes, keys)
    emit.add(Embed(weight="model.embed_tokens", scale=facts.embedding_scale, out="embed"))
    x = "embed"
    for layer in range(facts.num_layers):
        x = _attention_block(emit, facts, layer, x)
        x = _mlp_block(emit, facts, layer, x)
    emit.add(SelectRows(x=x, out="selected"))
    h = emit.norm("selected", "model.norm", "final")
    tied = facts.tied_embeddings and "lm_head" not in schemes
    if "model.embed_tokens" in schemes:
        raise EngineError(f"the embedding is quantized ({schemes['model.embed_tokens'].weight})",
                          "Embeddings stay unquantized; quantize lm_head instead.")
    head = "model.embed_tokens" if tied else "lm_head"
    logits = emit.linear(h, head, facts.vocab_size, facts.hidden_size, False, "logits")
    if facts.logit_softcap is not None:
        emit.add(SoftCap(x=logits, cap=facts.logit_softcap, out="capped"))
    program = Program(ops=tuple(emit.ops))
    program.check()
    return program


def _attention_block(emit: _Emitter, facts: ModelFacts, layer: int, x: str) -> str:
    base, at = f"model.layers.{layer}.self_attn", f"L{layer}"
    heads, kv_heads, dim = facts.num_heads, facts.num_kv_heads, facts.head_dim
    h = emit.norm(x, f"model.layers.{layer}.input_layernorm", f"{at}.attn_in")
    widths = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
    if facts.fused_weights:
        emit.fused(h, f"{base}.qkv_proj", facts.hidden_size, facts.qkv_bias,
                   {f"{at}.{name}": width for name, width in widths.items()})
    else:
        for name, width in widths.items():
            emit.linear(h, f"{base}.{name}_proj", width, facts.hidden_size, facts.qkv_bias, f"{at}.{name}")
    q, k = f"{at}.q", f"{at}.k"
    if facts.qk_norm:
        q = emit.head_norm(q, f"{base}.q_norm", heads, f"{at}.q_norm")
        k = emit.head_norm(k, f"{base}.k_norm", kv_heads, f"{at}.k_norm")
    local = facts.is_local(layer)
    emit.add(Rope(x=q, heads=heads, head_dim=dim, local=local, out=f"{at}.q_rot"))
    emit.add(Rope(x=k, heads=kv_heads, head_dim=dim, local=local, out=f"{at}.k_rot"))
    emit.add(KVWrite(k=f"{at}.k_rot", v=f"{at}.v", layer=layer, kv_heads=kv_heads, head_dim=dim))
    emit.add(Attention(q=f"{at}.q_rot", layer=layer, heads=heads, kv_heads=kv_heads, head_dim=dim,
                       window=facts.window(layer), softcap=facts.attention_softcap, scale=facts.attention_scale,
                       out=f"{at}.attn"))
    o = emit.linear(f"{at}.attn", f"{base}.o_proj", facts.hidden_size, heads * dim, facts.output_bias, f"{at}.o")
    if facts.post_norms:
        o = emit.norm(o, f"model.layers.{layer}.post_attention_layernorm", f"{at}.o_norm")
    emit.add(Add(a=o, b=x, out=f"{at}.mid"))
    return f"{at}.mid"


def _mlp_block(emit: _Emitter, facts: ModelFacts, layer: int, x: str) -> str:
    base, at = f"model.layers.{layer}.mlp", f"L{layer}"
    before = "pre_feedforward_layernorm" if facts.post_norms else "post_attention_layernorm"
    h = emit.norm(x, f"model.layers.{layer}.{before}", f"{at}.mlp_in")
    width = facts.intermediate_size
    if facts.fused_weights:
        emit.fused(h, f"{base}.gate_up_proj", facts.hidden_size, facts.mlp_bias,
                   {f"{at}.gate": width, f"{at}.up": width})
    else:
        for name in ("gate", "up"):
            emit.linear(h, f"{base}.{name}_proj", width, facts.hidden_size, facts.mlp_bias, f"{at}.{name}")
    emit.add(SiluMul(gate=f"{at}.gate", up=f"{at}.up", activation=facts.activation, out=f"{at}.act"))
    down = emit.linear(f"{at}.act", f"{base}.down_proj", facts.hidden_size, width, facts.mlp_bias, f"{at}.down")
    if facts.post_norms:
        down = emit.norm(down, f"model.layers.{layer}.post_feedforward_layernorm", f"{at}.down_norm")
    emit.add(Add(a=down, b=x, out=f"{at}.end"))
    return f"{at}.end"
