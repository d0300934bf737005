"""Decode steps of a few layers, bound as the runtime binds them, captured and timed: ``tune_step``'s measure.

Weights are random; every sequence has a context of the wanted length in a cache of its own.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator
from collections.abc import Sequence as Ordered

import torch

from engines.build.bench_gpu import random_packed
from engines.build.buffers import assign
from engines.build.gpu_linears import impl_for
from engines.build.plan_gpu import workspace_bytes
from engines.build.weights import linear_key, stored_names
from engines.plan import KernelChoice, Plan
from engines.request import SamplingParams
from engines.runtime.cuda.arena import Arena, KVCache
from engines.runtime.cuda.record import HostRecord, RowWriter, SlotState
from engines.runtime.cuda.shape import Shape
from engines.runtime.cuda.steps import Steps
from engines.runtime.cuda.weights import DeviceWeights
from engines.runtime.sequence import Sequence

_LOG = logging.getLogger(__name__)
CONTEXT = 160
#: Attention must also be good here (or at the engine's longest sequence): step size -> contexts.
LONG = {1: (8192, 32768), 8: (4096, 16384), 32: (2048,), 128: (1024,)}
REPLAYS = 21


def small_plan(plan: Plan, batch: int) -> Plan:
    """The same program cut to few tokens: everything but the KernelTable's meaning stays."""
    limits = plan.limits.model_copy(update={
        "max_seq_len": max(max(contexts(plan, size)) for size in LONG), "max_batch_size": batch,
        "max_num_tokens": batch, "num_blocks": batch * -(-max(contexts(plan, batch)) // plan.limits.block_size)})
    return plan.model_copy(update={"limits": limits})


def contexts(plan: Plan, size: int) -> tuple[int, ...]:
    """The contexts at which attention of ``size`` sequences is timed: ``CONTEXT``, then long ones that fit."""
    most = min(plan.limits.max_seq_len, plan.limits.num_blocks * plan.limits.block_size // size)
    return CONTEXT, *sorted({max(CONTEXT, min(its, most)) for its in LONG[size]} - {CONTEXT})


class StepBench:
    """Times decode steps of one small plan under different KernelTables."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.device = plan.device.torch_device
        self._weights = DeviceWeights(small_plan(plan, 1), random_tensors(plan, self.device), self.device)
        self._cache: tuple[int, KVCache] | None = None

    def _steps(self, batch: int, kernels: Ordered[KernelChoice]) -> tuple[Steps, Arena]:
        """A step of ``batch`` sequences with ``CONTEXT`` tokens each."""
        plan = small_plan(self.plan, batch).model_copy(update={"kernels": tuple(kernels)})
        arena = Arena(plan, assign(plan.program), workspace_bytes(plan.program, plan.kernels, batch), self.device)
        if self._cache is None or self._cache[0] != batch:
            self._cache = None  # the last size's memory first
            scales = [(torch.ones((), device=self.device),) * 2] * plan.model.num_layers if plan.kv.quantized else None
            self._cache = batch, KVCache(plan, plan.limits.num_blocks, scales, self.device)
        _fill_record(plan, arena, batch, CONTEXT)
        return Steps(plan, self._weights, arena, self._cache[1]), arena

    def launch_once(self, batch: int, kernels: Ordered[KernelChoice], long: bool = False) -> None:
        """One step, for collecting variants."""
        self._steps(batch, kernels)[0].each_kind(Shape(batch, decodes=batch, long=long))

    def microseconds(self, batch: int, kernels: Ordered[KernelChoice], lengths: Ordered[int] = (CONTEXT,),
                     long: bool = False) -> list[float]:
        """Medians of a captured step's replays with contexts of ``lengths``; infinite where a kernel does not run."""
        shape = Shape(batch, decodes=batch, long=long)
        try:
            (steps, arena), stream = self._steps(batch, kernels), torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                steps.body(shape)
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin()
                try:
                    steps.body(shape)
                finally:
                    graph.capture_end()
                found = []
                for length in lengths:
                    _fill_record(self.plan, arena, batch, length)
                    graph.replay()
                    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                             for _ in range(REPLAYS)]
                    for begin, end in marks:
                        begin.record()
                        graph.replay()
                        end.record()
                    stream.synchronize()
                    found.append(statistics.median(begin.elapsed_time(end) for begin, end in marks) * 1e3)
        except Exception as error:  # a candidate that cannot run here is no candidate
            _LOG.warning("a step of %d tokens does not run: %s", batch, error)
            return [float("inf")] * len(lengths)
        return found


def _fill_record(plan: Plan, arena: Arena, batch: int, context: int) -> None:
    """``batch`` sequences with ``context`` - 1 cached tokens each."""
    record = HostRecord(arena.layout, pinned=False)
    writer = RowWriter(record, plan.limits.block_size)
    blocks = -(-context // plan.limits.block_size)
    for row in range(batch):
        sequence = Sequence(row, [1] * context, context, SamplingParams(), 0, frozenset(), computed=context - 1,
                            table=list(range(row * blocks, (row + 1) * blocks)))
        writer.add(SlotState(sequence, row, sent=blocks), 1)
    arena.step.known[:batch, :blocks] = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    words = writer.finish(batch)
    arena.record.words[:words].copy_(record.words[:words])


def random_tensors(plan: Plan, device: torch.device) -> dict[str, torch.Tensor]:
    """Random weights for a plan's program, by stored name."""
    found: dict[str, torch.Tensor] = {}
    hidden = plan.model.hidden_size
    for op in plan.program.linears():
        key = linear_key(op)
        found |= {f"{key}.{name}": tensor for name, tensor in random_packed(op, impl_for(op), device).tensors.items()}
        if op.bias:
            found[f"{key}.bias"] = torch.zeros(op.n, dtype=torch.bfloat16, device=device)
    widths = {name: op.k for op in plan.program.linears() for name in _scale_names(plan, op.x)}
    for name in stored_names(plan.program, plan.kv):
        if name == "model.embed_tokens.weight":
            found[name] = torch.randn(plan.model.vocab_size, hidden, device=device, dtype=torch.bfloat16)
        elif name.endswith("pre_quant_scale"):
            found[name] = torch.ones(widths.get(name, hidden), device=device)
        elif name.endswith("_scale"):
            found[name] = torch.tensor(0.02, device=device)
        else:
            found[name] = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    return found


def _scale_names(plan: Plan, value: str) -> Iterator[str]:
    for op in plan.program.ops:
        quant = getattr(op, "quant", None)
        if quant is not None and op.out == value and quant.pre_quant_scale:  # type: ignore[union-attr]
            yield quant.pre_quant_scale
