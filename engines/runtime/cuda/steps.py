"""One engine's bound Program on its device: what a step launches, as functions of its shape.

Made anew when the KV cache gets its final size, as every kernel's arguments hold the cache's address.
"""

from __future__ import annotations

from collections.abc import Iterator

from engines.build.buffers import body_and_head
from engines.kernels import prepare
from engines.plan import Plan
from engines.runtime.cuda.arena import Arena, KVCache
from engines.runtime.cuda.graphs import Key, decode_sizes, keys
from engines.runtime.cuda.head import Head
from engines.runtime.cuda.ops import Binder
from engines.runtime.cuda.shape import Shape
from engines.runtime.cuda.weights import DeviceWeights


class Steps:
    """``body`` and ``head`` of one engine."""

    def __init__(self, plan: Plan, weights: DeviceWeights, arena: Arena, cache: KVCache) -> None:
        self._plan, self._arena = plan, arena
        body, head = body_and_head(plan.program)
        self._binder = Binder(plan, weights, arena, cache)
        self._body = self._binder.bind(body)
        self.head = Head(self._binder, head)
        self._pdl = plan.device.capability >= 90

    @property
    def kernels(self) -> int:
        """Bound Ops of the body: its kernels in a decode step, prepare and plan left out."""
        return len(self._body)

    def body(self, shape: Shape) -> None:
        """All layers: reads the record, stores keys and values, leaves hidden rows for the head."""
        self._prepare(shape)
        self._binder.plan_attention(shape)
        for bound in self._body:
            bound.run(shape)

    def each_kind(self, shape: Shape) -> None:
        """As ``body``, but one Op of each kind: layers are alike, so these are all kernel variants of the step."""
        self._prepare(shape)
        self._binder.plan_attention(shape)
        for bound in {bound.kind: bound for bound in self._body}.values():
            bound.run(shape)

    def _prepare(self, shape: Shape) -> None:
        record, step = self._arena.record, self._arena.step
        t, rows = shape.tokens, shape.rows
        prepare.launch(record.rows, record.head, record.ids, record.new_blocks, self._arena.sampled, step.known,
                       step.token_ids[:t], step.positions[:t], step.slots[:t], step.seq_lens[:rows], step.tables[:rows],
                       block_size=self._plan.limits.block_size, pdl=self._pdl)

    def launch(self, key: Key) -> None:
        """What the graph ``key`` consists of."""
        if key.kind != "head":
            self.body(_shape(key))
        if key.kind in ("decode", "head"):
            self.head(key.rows)

    def touch(self, step: Key | Shape) -> None:
        """Launch every kernel variant of one of ``reachable``, once. The result means nothing."""
        if isinstance(step, Shape):
            self.each_kind(step)
            return
        if step.kind != "head":
            self.each_kind(_shape(step))
        if step.kind in ("decode", "head"):
            self.head(step.rows)

    def long_from(self, rows: int) -> int | None:
        """``Configs.long_from``."""
        return self._binder.configs.long_from(rows)

    def graph_keys(self) -> list[Key]:
        """Every graph of this engine, largest first."""
        limits = self._plan.limits
        return keys(limits.max_batch_size, limits.max_num_tokens, lambda rows: self.long_from(rows) is not None)

    def reachable(self) -> Iterator[Key | Shape]:
        """Steps that together launch every kernel variant this engine can reach: every graph, then eager prefill at
        every size where some kernel's choice changes."""
        limits = self._plan.limits
        yield from self.graph_keys()
        cuts = {choice.max_tokens for choice in self._plan.kernels if choice.max_tokens < limits.max_num_tokens}
        sizes = sorted({*cuts, *(cut + 1 for cut in cuts), limits.max_num_tokens})
        for tokens in sizes:
            yield Shape(tokens, prefills=1, longest=tokens)
            yield Shape(tokens, prefills=1, longest=tokens, whole=True)
        for bucket in decode_sizes(limits.max_batch_size):
            if 4 <= bucket < limits.max_num_tokens:
                yield Shape(bucket + 1, decodes=bucket, prefills=1, longest=2)


def _shape(key: Key) -> Shape:
    if key.kind in ("decode", "body"):
        return Shape(key.tokens, decodes=key.rows, long=key.long)
    return Shape(key.tokens, prefills=key.rows, longest=key.tokens, whole=key.kind == "prompt")
