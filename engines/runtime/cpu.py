"""The CPU backend: every Op of a Program bound to its operator and weights, once, when an engine opens.

Binding turns an Op into a function ``step(values, context)``: value names become places in a list, weights and
constants are closed over. Running a Program is then one loop over functions; at one token its cost is the operators'
and little else. A value's place is reused as soon as its last reader is bound, so a long prefill holds a few rows'
worth of activations, not one set a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from engines.build.weights import Weights
from engines.kernels.cpu import rows as row_ops
from engines.kernels.cpu.attention import attention
from engines.kernels.cpu.attention import plan as plan_attention
from engines.kernels.cpu.linear import OPERATORS
from engines.kernels.cpu.rope_kv import LayerCache, rotate
from engines.plan import Plan
from engines.program import (
    Add,
    AddNorm,
    Attention,
    Embed,
    GatedSilu,
    HeadNorm,
    KVWrite,
    Linear,
    Program,
    Quantize,
    RMSNorm,
    Rope,
    RopeKV,
    SelectRows,
    SiluMul,
    SoftCap,
    Split,
    writes,
)
from engines.runtime.batch import Batch
from engines.runtime.cpu_constants import kv_scales, quantizer, rotary_tables
from engines.runtime.cpu_step import Places, Step, StepContext, Values


class CpuBackend:
    """An engine's weights, caches and bound Program on this CPU. All calls under ``torch.inference_mode``."""

    def __init__(self, plan: Plan, weights: Weights) -> None:
        self._plan = plan
        self._weights = weights
        self._consumers = plan.program.consumers()
        self._rotary = rotary_tables(plan)
        self._windows = {op.window for op in plan.program.ops if isinstance(op, Attention)}
        self._caches = [self._cache(layer) for layer in range(plan.model.num_layers)]
        self._body: list[Step] = []
        self._head: list[Step] = []
        self._bind(plan.program)
        weights.done()

    def _cache(self, layer: int) -> LayerCache:
        model, limits, kv = self._plan.model, self._plan.limits, self._plan.kv
        scales = kv_scales(self._plan, self._weights, layer) if kv.quantized else None
        return LayerCache.empty(limits.num_blocks * limits.block_size, model.num_kv_heads, model.head_dim, scales,
                                kv.dtype)

    def _bind(self, program: Program) -> None:
        places = Places(program)
        prepared = self._prepare_linears(program)
        target = self._body
        for index, op in enumerate(program.ops):
            target.append(self._linear(op, places, prepared) if isinstance(op, Linear)
                          else _BINDERS[type(op)](self, op, places))
            if isinstance(op, SelectRows):
                target = self._head
                self._selected = places.of(op.out)
            places.retire(index, op)
        [logits] = writes(program.ops[-1])
        self._logits = places.of(logits)
        self._count = places.count

    def _prepare_linears(self, program: Program) -> dict[str, Callable[[Any], torch.Tensor]]:
        """Private layouts, largest weight first: its temporaries are gone before the others take memory."""
        prepared = {}
        for op in sorted(program.linears(), key=lambda op: -op.n * op.k):
            stored = self._weights.linear(op)
            run = OPERATORS[self._plan.choice(op).impl].prepare(stored)
            prepared[op.out] = run if stored.bias is None else _with_bias(run, stored.bias)
        return prepared

    def stepping(self) -> AbstractContextManager[None]:
        """What holds around a whole step; nothing here."""
        return nullcontext()

    def context(self, batch: Batch) -> StepContext:
        """Everything that is made once a step."""
        rotary = {local: (cos.index_select(0, batch.positions).unsqueeze(1),
                          sin.index_select(0, batch.positions).unsqueeze(1))
                  for local, (cos, sin) in self._rotary.items()}
        size = self._plan.limits.block_size
        return StepContext(batch, rotary, {
            window: plan_attention(batch.tables, batch.lengths, batch.new, size, window) for window in self._windows})

    def body(self, context: StepContext) -> torch.Tensor:
        """All layers; stores keys and values. Returns the hidden rows [r, hidden] whose logits are wanted."""
        values: Values = [None] * self._count
        for step in self._body:
            step(values, context)
        return values[self._selected]

    def head(self, rows: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Final norm and output layer of hidden rows -> logits float32 [r, vocabulary]."""
        values: Values = [None] * self._count
        values[self._selected] = rows
        for step in self._head:
            step(values, context)
        return values[self._logits]

    # One method binds one kind of Op.

    def _linear(self, op: Linear, places: Places, prepared: dict[str, Callable[[Any], torch.Tensor]]) -> Step:
        run, x = prepared[op.out], places.of(op.x)
        out = places.of(op.out)

        def step(v: Values, context: StepContext) -> None:
            v[out] = run(v[x])
        return step

    def _embed(self, op: Embed, places: Places) -> Step:
        table, out, scale = self._weights.take(f"{op.weight}.weight"), places.of(op.out), op.scale

        def step(v: Values, context: StepContext) -> None:
            rows = table.index_select(0, context.batch.tokens).float()
            v[out] = rows if scale == 1.0 else rows * scale
        return step

    def _norm_constants(self, op: RMSNorm | AddNorm | HeadNorm) -> tuple[torch.Tensor, torch.Tensor]:
        return row_ops.norm_weight(self._weights.take(f"{op.weight}.weight"), op.eps, op.offset)

    def _rms_norm(self, op: RMSNorm, places: Places) -> Step:
        weight, floor = self._norm_constants(op)
        quantize = quantizer(self._weights, op.quant)
        x, out = places.of(op.x), places.of(op.out)

        def step(v: Values, context: StepContext) -> None:
            v[out] = quantize(row_ops.rms_norm(v[x], weight, floor))
        return step

    def _add_norm(self, op: AddNorm, places: Places) -> Step:
        weight, floor = self._norm_constants(op)
        quantize = quantizer(self._weights, op.quant)
        x, residual = places.of(op.x), places.of(op.residual)
        residual_out, out = places.of(op.residual_out), places.of(op.out)

        def step(v: Values, context: StepContext) -> None:
            h = v[residual_out] = v[x].add_(v[residual])
            v[out] = quantize(row_ops.rms_norm(h, weight, floor))
        return step

    def _quantize(self, op: Quantize, places: Places) -> Step:
        quantize = quantizer(self._weights, op.quant)
        alone = len(self._consumers[op.x]) == 1
        x, out = places.of(op.x), places.of(op.out)

        def step(v: Values, context: StepContext) -> None:
            v[out] = quantize(v[x] if alone else v[x].clone())
        return step

    def _split(self, op: Split, places: Places) -> Step:
        x, widths = places.of(op.x), list(op.widths)
        outs = [places.of(name) for name in op.outs]

        def step(v: Values, context: StepContext) -> None:
            for out, piece in zip(outs, v[x].split(widths, -1), strict=True):
                v[out] = piece
        return step

    def _head_norm(self, op: HeadNorm, places: Places) -> Step:
        weight, floor = self._norm_constants(op)
        x, out, shape = places.of(op.x), places.of(op.out), (-1, op.heads, op.head_dim)

        def step(v: Values, context: StepContext) -> None:
            v[out] = row_ops.rms_norm(v[x].reshape(shape), weight, floor).flatten(1)
        return step

    def _rope(self, op: Rope, places: Places) -> Step:
        x, out, shape, local = places.of(op.x), places.of(op.out), (-1, op.heads, op.head_dim), op.local

        def step(v: Values, context: StepContext) -> None:
            v[out] = rotate(v[x].reshape(shape).clone(), *context.rotary[local]).flatten(1)
        return step

    def _kv_write(self, op: KVWrite, places: Places) -> Step:
        k, v_at, cache, shape = places.of(op.k), places.of(op.v), self._caches[op.layer], (-1, op.kv_heads, op.head_dim)

        def step(v: Values, context: StepContext) -> None:
            cache.store(context.batch.slots, torch.cat([v[k].reshape(shape), v[v_at].reshape(shape)], 1))
        return step

    def _rope_kv(self, op: RopeKV, places: Places) -> Step:
        qkv, out, cache = places.of(op.qkv), places.of(op.out), self._caches[op.layer]
        shape = (-1, op.heads + 2 * op.kv_heads, op.head_dim)
        rotated, heads, stored, local = op.heads + op.kv_heads, op.heads, 2 * op.kv_heads, op.local
        normalise = self._head_normaliser(op)

        def step(v: Values, context: StepContext) -> None:
            rows = v[qkv].view(shape)
            normalise(rows)
            rotate(rows.narrow(1, 0, rotated), *context.rotary[local])
            cache.store(context.batch.slots, rows.narrow(1, heads, stored))
            v[out] = rows.narrow(1, 0, heads)
        return step

    def _head_normaliser(self, op: RopeKV) -> Callable[[torch.Tensor], object]:
        """Normalises q and k heads of rows [t, heads + 2 kv_heads, head_dim] in place."""
        if (norms := op.norms) is None:
            return lambda rows: rows
        parts = []
        for name, first, count in ((norms.q, 0, op.heads), (norms.k, op.heads, op.kv_heads)):
            weight = self._weights.take(f"{name}.weight")
            parts.append((first, count, row_ops.norm_weight(weight, norms.eps, norms.offset)))

        def run(rows: torch.Tensor) -> None:
            for first, count, constants in parts:
                part = rows.narrow(1, first, count)
                part.copy_(row_ops.rms_norm(part, *constants))
        return run

    def _attention(self, op: Attention, places: Places) -> Step:
        q, out, cache = places.of(op.q), places.of(op.out), self._caches[op.layer]
        shape, kv_heads, window, scale, softcap = (-1, op.heads, op.head_dim), op.kv_heads, op.window, op.factor, (
            op.softcap)

        def step(v: Values, context: StepContext) -> None:
            v[out] = attention(v[q].view(shape), cache, context.attention[window], kv_heads, scale, softcap)
        return step

    def _silu_mul(self, op: SiluMul, places: Places) -> Step:
        gate, up, out, activation = places.of(op.gate), places.of(op.up), places.of(op.out), op.activation

        def step(v: Values, context: StepContext) -> None:
            v[out] = row_ops.gated(v[gate], v[up], activation)
        return step

    def _gated_silu(self, op: GatedSilu, places: Places) -> Step:
        quantize, gate_up, out = quantizer(self._weights, op.quant), places.of(op.gate_up), places.of(op.out)
        activation = op.activation

        def step(v: Values, context: StepContext) -> None:
            gate, up = v[gate_up].chunk(2, -1)
            v[out] = quantize(row_ops.gated(gate, up, activation))
        return step

    def _soft_cap(self, op: SoftCap, places: Places) -> Step:
        x, out, cap = places.of(op.x), places.of(op.out), op.cap

        def step(v: Values, context: StepContext) -> None:
            v[out] = (v[x] / cap).tanh_().mul_(cap)
        return step

    def _add(self, op: Add, places: Places) -> Step:
        a, b, out = places.of(op.a), places.of(op.b), places.of(op.out)

        def step(v: Values, context: StepContext) -> None:
            v[out] = v[a] + v[b]
        return step

    def _select_rows(self, op: SelectRows, places: Places) -> Step:
        x, out = places.of(op.x), places.of(op.out)

        def step(v: Values, context: StepContext) -> None:
            wanted = context.batch.rows
            v[out] = v[x] if wanted is None else v[x].index_select(0, wanted)
        return step


def _with_bias(run: Callable[[Any], torch.Tensor], bias: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    return lambda rows: run(rows).add_(bias)


_BINDERS: dict[type, Callable[[CpuBackend, Any, Places], Step]] = {
    Embed: CpuBackend._embed, RMSNorm: CpuBackend._rms_norm, AddNorm: CpuBackend._add_norm,
    Quantize: CpuBackend._quantize, Split: CpuBackend._split, HeadNorm: CpuBackend._head_norm,
    Rope: CpuBackend._rope, KVWrite: CpuBackend._kv_write, SoftCap: CpuBackend._soft_cap,
    RopeKV: CpuBackend._rope_kv, Attention: CpuBackend._attention, SiluMul: CpuBackend._silu_mul,
    GatedSilu: CpuBackend._gated_silu, Add: CpuBackend._add, SelectRows: CpuBackend._select_rows,
}
