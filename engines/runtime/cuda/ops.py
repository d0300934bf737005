"""Every Op of a Program bound to its kernel, weights and buffers, once: a function of the step's shape.

Binding closes over weights and constants; what is left for a step is its shape (``Shape``), from which views and grids
follow. The functions only launch kernels: they are run eagerly, captured into CUDA graphs, and dry-run to learn which
variants exist, all through the same code.

Neighbours are bound together, so that a decode step has up to three kernels less a layer:

* an attention with the RoPE before it, for few decoding rows (``kernels/attention_rope``, where the KernelTable says
  so; prefill rows need rotated queries and keys in memory first). The norm before that layer's qkv linear is then the
  fence that early reads of the cache need;
* a gate_up linear with its activation, where the linear runs as GEMV or mm: it stores silu(gate) * up itself
  (``kernels/linear/gate_up``);
* with a quantization that alone reads it, where attention kernels can do that themselves (fp8 static, pre_quant_scale,
  and for pure decode steps int8 groups).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engines.build.gpu_linears import activation_mode
from engines.build.impls import group_of
from engines.build.kernel_table import silu_shape
from engines.errors import EngineError
from engines.kernels import (
    attention_decode,
    attention_plan,
    attention_prefill,
    attention_rope,
    embedding,
    norm,
    quantize,
    rope_kv,
    silu_mul,
)
from engines.kernels.jit import ActQuant as Mode
from engines.kernels.jit import next_pow2
from engines.kernels.linear.gate_up import Activation, launch_gate_up
from engines.kernels.linear.impls import IMPLS
from engines.kernels.read_ahead import ReadAhead
from engines.plan import Plan
from engines.program import (
    ActQuant,
    AddNorm,
    Attention,
    Embed,
    GatedSilu,
    Linear,
    Op,
    Quantize,
    RMSNorm,
    RopeKV,
)
from engines.runtime.cuda.arena import Arena, KVCache
from engines.runtime.cuda.configs import Configs
from engines.runtime.cuda.neighbours import attention_groups, fences, following_linears, kind_of
from engines.runtime.cuda.shape import Bound, Run, Shape
from engines.runtime.cuda.weights import DeviceWeights


@dataclass(frozen=True, slots=True)
class Codes:
    """How an Op's rows leave: the kernels' mode and its operands."""

    mode: Mode
    group: int
    input_scale: torch.Tensor | None
    pre_quant_scale: torch.Tensor | None


class Binder:
    """Binds Ops for one runner."""

    def __init__(self, plan: Plan, weights: DeviceWeights, arena: Arena, cache: KVCache) -> None:
        self.plan, self.weights, self.arena, self.cache = plan, weights, arena, cache
        self.configs = Configs(plan)
        self._quants: dict[str, ActQuant] = {
            op.out: op.quant for op in plan.program.ops
            if isinstance(op, RMSNorm | AddNorm | GatedSilu | Quantize) and op.quant is not None}
        self._fences = fences(plan.program.ops)
        self._following = following_linears(plan.program.ops)
        self._binders: dict[type, Callable[[Any], Run]] = {
            Embed: self._embed, RMSNorm: self._norm, AddNorm: self._norm, Linear: self._linear, RopeKV: self._rope_kv,
            Quantize: self._quantize, GatedSilu: self._silu}

    def bind(self, ops: Sequence[Op]) -> list[Bound]:
        """The functions of a Program's body, in order."""
        bound: list[Bound] = []
        for group in attention_groups(ops):
            op = group.op
            if isinstance(op, Attention):
                run = self._attention(op, group.rope, group.quant)
            elif isinstance(op, Linear) and group.silu is not None:
                run = self._gated(op, group.silu)
            elif type(op) in self._binders:
                run = self._binders[type(op)](op)
            else:
                raise EngineError(f"{op.op} was left unfused, which has no GPU kernel",
                                  "The layer's linears are on different grids or scales; quantize them alike.")
            kinds = [kind_of(part) for part in (group.rope, op, group.quant, group.silu) if part is not None]
            bound.append(Bound(f"{kinds} {getattr(op, 'out', '') in self._fences}", run))
        return bound

    def plan_attention(self, shape: Shape) -> None:
        """The decode rows' work lists, one for each window that layers have, once a step."""
        for work in self.arena.attention[shape.decodes, shape.long].values() if shape.decodes else ():
            attention_plan.make_plan(self.arena.step.seq_lens[:shape.decodes], work, self.plan.model.num_kv_heads,
                                     self.configs.attention(shape.decodes, shape.long))

    def codes(self, quant: ActQuant | None) -> Codes:
        """A program's activation quantization as the kernels take it."""
        if quant is None:
            return Codes(Mode.NONE, 0, None, None)
        name = None if quant.grid is None else activation_mode(quant.grid)
        return Codes(Mode.NONE if name is None else Mode[name], 0 if quant.grid is None else group_of(quant.grid),
                     self.weights.optional(quant.input_scale), self.weights.optional(quant.pre_quant_scale))

    def static_scale(self, op: Linear) -> torch.Tensor | None:
        """The calibrated scale that a linear's rows were quantized with, or None."""
        quant = self._quants.get(op.x)
        return self.weights.optional(None if quant is None else quant.input_scale)

    # One method binds one kind of Op.

    def _embed(self, op: Embed) -> Run:
        table, rows, ids = self.weights.vector(f"{op.weight}.weight"), self.arena.rows, self.arena.step.token_ids
        return lambda shape: void(embedding.launch(ids[:shape.tokens], table, rows.of(op.out, shape.tokens),
                                                   self.configs.of("embed", shape.tokens), scale=op.scale))

    def _norm(self, op: RMSNorm | AddNorm) -> Run:
        weight, codes, rows = self.weights.norm(op.weight, op.offset), self.codes(op.quant), self.arena.rows

        def run(shape: Shape) -> None:
            config = self.configs.of("norm", shape.tokens)
            residual = residual_out = None
            if isinstance(op, AddNorm):
                residual, residual_out = rows.of(op.residual, shape.tokens), rows.of(op.residual_out, shape.tokens)
            norm.launch(rows.of(op.x, shape.tokens), weight, rows.of(op.out, shape.tokens), config, eps=op.eps,
                        residual=residual, residual_out=residual_out, pre_quant_scale=codes.pre_quant_scale,
                        quant=codes.mode, group=codes.group, input_scale=codes.input_scale,
                        scales=rows.scales(op.out, shape.tokens), fence=op.out in self._fences)
        return run

    def _linear(self, op: Linear) -> Run:
        packed, rows = self.weights.linear(op), self.arena.rows
        impl, workspace = IMPLS[self.plan.choice(op).impl], self.arena.workspace
        static = self.static_scale(op)

        def run(shape: Shape) -> None:
            scale = rows.scales(op.x, shape.tokens) if static is None else static
            impl.launch(rows.of(op.x, shape.tokens), packed, self.configs.linear(op, shape.tokens),
                        rows.of(op.out, shape.tokens), x_scale=scale, workspace=workspace)
        return run

    def _rope_kv(self, op: RopeKV) -> Run:
        rows, step, table, norms = self.arena.rows, self.arena.step, self.weights.cos_sin(op.local), op.norms
        q_norm, k_norm = (None, None) if norms is None else (
            self.weights.norm(norms.q, norms.offset), self.weights.norm(norms.k, norms.offset))
        (k_cache, v_cache), (k_scale, v_scale) = self.cache.layer(op.layer), self.cache.scale(op.layer)

        def run(shape: Shape) -> None:
            t = shape.tokens
            fresh = self._fresh(shape)
            rope_kv.launch(rows.of(op.qkv, t), table, step.positions[:t], step.slots[:t],
                           rows.of(op.out, t).view(t, op.heads, op.head_dim), k_cache, v_cache,
                           self.configs.of("rope_kv", t), k_scale=k_scale, v_scale=v_scale, q_norm=q_norm,
                           k_norm=k_norm, eps=0.0 if norms is None else norms.eps,
                           k_out=None if fresh is None else fresh[0], v_out=None if fresh is None else fresh[1])
        return run

    def _fresh(self, shape: Shape) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rows [tokens, kv heads, head_dim] for the step's own keys and values, where prefill attention reads those
        instead of the cache: 1.4 times as fast, as nothing is looked up."""
        rows = self.arena.fresh
        return None if rows is None or not shape.whole else (rows[0][:shape.tokens], rows[1][:shape.tokens])

    def _quantize(self, op: Quantize) -> Run:
        codes, rows = self.codes(op.quant), self.arena.rows

        def run(shape: Shape) -> None:
            quantize.launch(rows.of(op.x, shape.tokens), rows.of(op.out, shape.tokens),
                            self.configs.of("quantize", shape.tokens, "any"), quant=codes.mode,
                            group=codes.group, pre_quant_scale=codes.pre_quant_scale, input_scale=codes.input_scale,
                            scales=rows.scales(op.out, shape.tokens))
        return run

    def _silu(self, op: GatedSilu) -> Run:
        codes, rows = self.codes(op.quant), self.arena.rows

        def run(shape: Shape) -> None:
            silu_mul.launch(rows.of(op.gate_up, shape.tokens), rows.of(op.out, shape.tokens),
                            self.configs.of("silu_mul", shape.tokens, silu_shape(op)), activation=op.activation,
                            pre_quant_scale=codes.pre_quant_scale, quant=codes.mode, group=codes.group,
                            input_scale=codes.input_scale, scales=rows.scales(op.out, shape.tokens))
        return run

    def _gated(self, op: Linear, silu: GatedSilu) -> Run:
        """A gate_up linear and its activation: one kernel (and a quantization) at the step sizes where it can be."""
        codes, rows, packed, impl = self.codes(silu.quant), self.arena.rows, self.weights.linear(op), IMPLS[
            self.plan.choice(op).impl]
        static, workspace = self.static_scale(op), self.arena.workspace
        activation = Activation(silu.activation, codes.mode, codes.group, codes.input_scale, codes.pre_quant_scale)

        def run(shape: Shape) -> None:
            t = shape.tokens
            launch_gate_up(impl, rows.of(op.x, t), packed, self.configs.linear(op, t), rows.of(op.out, t),
                           rows.of(silu.out, t), activation, x_scale=rows.scales(op.x, t) if static is None else static,
                           scales=rows.scales(silu.out, t), workspace=workspace,
                           silu_config=self.configs.of("silu_mul", t, silu_shape(silu)),
                           quantize_config=self.configs.of("quantize", t, f"n={silu.width}"))
        return run

    def _attention(self, op: Attention, rope: RopeKV | None, quant: Quantize | None) -> Run:
        codes = self.codes(None if quant is None else quant.quant)
        plain = codes.mode in (Mode.NONE, Mode.FP8_STATIC)
        grouped = codes.mode.per_group and not self.plan.deterministic and (
            op.head_dim % codes.group == 0 and op.head_dim == next_pow2(op.head_dim))
        alone = None if quant is None or plain else self._quantize(quant)
        nothing = Codes(Mode.NONE, 0, None, None)
        rotate = None if rope is None else self._rope_kv(rope)
        following = self._ahead(op)

        def run(shape: Shape) -> None:
            itself = shape.decodes > 0 and self._rotates_itself(shape, rope)
            if rotate is not None and (shape.prefills or not itself):
                rotate(shape)
            fused = quant is not None and (plain or (grouped and not shape.prefills))
            target = quant.out if fused and quant is not None else op.out
            if shape.decodes:
                self._decode(op, rope if itself else None, target, shape, codes if fused else nothing, following)
            if shape.prefills:
                self._prefill(op, target, shape, codes if fused else nothing)
            if alone is not None and not fused:
                alone(shape)
        return run

    def _rotates_itself(self, shape: Shape, rope: RopeKV | None) -> bool:
        """Whether decoding rows take the attention kernel that rotates and stores its own token: whole heads, and
        without a norm of theirs."""
        whole = rope is not None and rope.norms is None and (
            self.weights.cos_sin(rope.local).shape[1] == rope.head_dim)
        return whole and bool(self.configs.attention(shape.decodes, shape.long)["FUSED"])

    def _decode(self, op: Attention, rope: RopeKV | None, target: str, shape: Shape, codes: Codes,
                following: Sequence[torch.Tensor]) -> None:
        rows, b = self.arena.rows, shape.decodes
        ahead = None
        if following:
            most = self.configs.of("read_ahead", b, "weights")
            ahead = ReadAhead(following, most["MIB"] << 20, most["DELAY"])
        (k_cache, v_cache), (k_scale, v_scale) = self.cache.layer(op.layer), self.cache.scale(op.layer)
        tables, work = self.arena.step.tables[:b], self.arena.attention[b, shape.long][op.window]
        config = self.configs.attention(b, shape.long)
        keys: dict[str, Any] = {
            "sm_scale": op.factor, "softcap": op.softcap or 0.0, "k_scale": k_scale, "v_scale": v_scale,
            "pre_quant_scale": codes.pre_quant_scale,
            "quant": codes.mode, "group": codes.group, "input_scale": codes.input_scale,
            "scales": rows.scales(target, b) if codes.mode.per_group else None, "ahead": ahead}
        if rope is not None:
            attention_rope.launch(rows.of(rope.qkv, b), self.weights.cos_sin(rope.local), k_cache, v_cache, tables,
                                  work, rows.of(target, b), config, early=rope.qkv in self._fences.values(), **keys)
            return
        q = rows.of(op.q, b).view(b, op.heads, op.head_dim)
        attention_decode.launch(q, k_cache, v_cache, tables, work, rows.of(target, b), config, **keys)

    def _ahead(self, op: Attention) -> list[torch.Tensor]:
        """What an attention's idle programs bring into L2: the weights of the two linears behind it. Found when the Op
        is bound: looking a weight up may read it, which a capture does not allow."""
        if not self.configs.has("read_ahead", "weights"):  # an engine of before
            return []
        return [max(self.weights.linear(linear).tensors.values(), key=lambda tensor: tensor.nbytes)
                for linear in self._following[op.out]]

    def _prefill(self, op: Attention, target: str, shape: Shape, codes: Codes) -> None:
        rows, step, t = self.arena.rows, self.arena.step, shape.tokens
        keys, values = self.cache.layer(op.layer)
        k_scale, v_scale = self.cache.scale(op.layer)
        span = slice(shape.decodes, shape.rows)
        tables: torch.Tensor | None = step.tables[span]
        kernel = "tile"
        if (fresh := self._fresh(shape)) is not None:
            (keys, values), tables = fresh, None
            kernel = "rows" if self.configs.has("attention_prefill", "rows") else kernel
        attention_prefill.launch(rows.of(op.q, t).view(t, op.heads, op.head_dim), keys, values, tables,
                                 self.arena.record.cu_seqlens(shape.decodes, shape.prefills), step.seq_lens[span],
                                 shape.longest, rows.of(target, t),
                                 self.configs.of("attention_prefill", shape.longest, kernel), sm_scale=op.factor,
                                 softcap=op.softcap or 0.0, window=op.window,
                                 k_scale=k_scale, v_scale=v_scale, pre_quant_scale=codes.pre_quant_scale,
                                 quant=codes.mode, input_scale=codes.input_scale)


def void(_: object) -> None:
    """For lambdas whose value nobody reads."""
