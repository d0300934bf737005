"""The whole step, tuned in company: every kernel's candidates inside a decode step of the real program.

A kernel that wins alone may lose in the chain: what it leaves in L2, how early its successor can start loading weights,
how many programs it keeps from it. At one token a layer is a chain of ten kernels of a few microseconds, so that is
where it counts. So the first layers of the program are bound exactly as the runtime binds them (random weights, a cache
with some context), captured as a CUDA graph, and one kernel after the other tries its candidates while the others stand
still at the best known. Linears bring the best few of their own timings.

Deterministic engines keep their first choices: theirs are constrained over all step sizes.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import torch

from calib.progress import Progress, Report
from calib.scheme import Frozen
from engines.build.bench_gpu import random_packed
from engines.build.buffers import assign
from engines.build.gpu_linears import impl_for
from engines.build.impls import group_of
from engines.build.kernel_table import entry, mode_of, rotate_themselves, silu_shape
from engines.build.plan_gpu import workspace_bytes
from engines.build.weights import linear_key, stored_names
from engines.kernels import attention_decode, norm, quantize, read_ahead, silu_mul
from engines.kernels.compile_ahead import collect, compile_variants
from engines.kernels.impl import KernelConfig
from engines.plan import KernelChoice, Plan, linear_shape
from engines.program import GatedSilu
from engines.request import SamplingParams
from engines.runtime.cuda.arena import Arena, KVCache
from engines.runtime.cuda.record import HostRecord, RowWriter, SlotState
from engines.runtime.cuda.shape import Shape
from engines.runtime.cuda.steps import Steps
from engines.runtime.cuda.weights import DeviceWeights
from engines.runtime.sequence import Sequence

_LOG = logging.getLogger(__name__)
#: Step sizes that are tuned -> the largest step that takes their choices.
SIZES = {1: 2, 8: 16, 32: 64, 128: 256}
SECONDS = {"quick": 32.0, "full": 96.0}
#: Parts of that, by step size: at one token most kernels can gain, and contexts are longest.
SHARES = {1: 5, 8: 2, 32: 1, 128: 1}
CONTEXT = 160
#: Attention must also be good here (or at the engine's longest sequence): step size -> contexts.
LONG = {1: (8192, 32768), 8: (4096, 16384), 32: (2048,), 128: (1024,)}
#: Up to this many sequences attention has idle programs.
READ_AHEAD = 8
LAYERS = 4
#: A change must be worth this much.
GAIN = 0.997


class StepTiming(Frozen):
    """Evidence: microseconds of a decode step of ``layers`` layers before and after, and what changed."""

    tokens: int
    layers: int
    before: float
    after: float
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """One kernel of the chain: an Op and shape of the KernelTable, and what may run it."""

    op: str
    shape: str
    candidates: tuple[KernelConfig, ...]


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

    def launch_once(self, batch: int, kernels: Ordered[KernelChoice]) -> None:
        """One step, for collecting variants."""
        self._steps(batch, kernels)[0].each_kind(Shape(batch, decodes=batch))

    def microseconds(self, batch: int, kernels: Ordered[KernelChoice], lengths: Ordered[int] = (CONTEXT,)
                     ) -> list[float]:
        """Medians of a captured step's replays with contexts of ``lengths``; infinite where a kernel does not run."""
        shape = Shape(batch, decodes=batch)
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
                             for _ in range(9)]
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


def sites(plan: Plan, tops: Mapping[str, Ordered[KernelConfig]], size: int, mode: str) -> list[Site]:
    """What may be changed in a step of ``size`` tokens, what matters most first. ``quick`` leaves what has moved a step
    by less than 1 %: norms, and linears but at one token, where a layer is a chain of ten short kernels (3 to 5 % on
    an H200). ``tops``: a linear's best configs by shape."""
    facts, model = plan.device.facts, plan.model
    kv_bytes = 1 if plan.kv.quantized else 2
    found = []
    if size <= READ_AHEAD:
        found.append(Site("read_ahead", "weights", tuple(read_ahead.candidates(facts, size))))
    found.append(Site("attention_decode", "split", tuple(attention_decode.candidates(
        model.head_dim, plan.limits.block_size, kv_bytes, facts, batch=size,
        fused=rotate_themselves(model, plan.program), gqa=model.num_heads // model.num_kv_heads))))
    for op in {silu_shape(op): op for op in plan.program.ops if isinstance(op, GatedSilu)}.values():
        grid = None if op.quant is None else op.quant.grid
        found.append(Site("silu_mul", silu_shape(op), tuple(silu_mul.candidates(
            op.width, mode_of(grid), 0 if grid is None else group_of(grid), facts))))
    if mode == "quick" and size > 1:
        return found
    found.append(Site("norm", f"n={model.hidden_size}", tuple(norm.candidates(model.hidden_size, facts))))
    if any(op.op == "quantize" for op in plan.program.ops):
        found.append(Site("quantize", "any", tuple(quantize.candidates(model.hidden_size, facts))))
    body = {linear_shape(op) for op in plan.program.linears()[:-1]}
    return found + [Site("linear", shape, tuple(configs)) for shape, configs in tops.items() if shape in body]


def with_choice(kernels: Ordered[KernelChoice], site: Site, config: KernelConfig, size: int, most: int
                ) -> list[KernelChoice]:
    """The table with ``config`` for steps of up to ``most`` tokens; a linear's entry is that of ``size`` alone."""
    if site.op == "linear":
        return [choice.model_copy(update={"config": config.to_json()})
                if choice.shape == site.shape and choice.max_tokens == size else choice for choice in kernels]
    kept = [choice for choice in kernels if (choice.op, choice.shape, choice.max_tokens) != (site.op, site.shape, most)]
    return [*kept, entry(site.op, site.shape, most, config)]


def tune_step(plan: Plan, mode: str, tops: Mapping[int, Mapping[str, Ordered[KernelConfig]]], report: Report
              ) -> tuple[list[KernelChoice], list[StepTiming]]:
    """The KernelTable of ``plan`` (a program of ``LAYERS`` layers) with what is best in company, and the evidence.

    ``tops``: step size -> linear shape -> its best configs.
    """
    sizes = [size for size in SIZES if size <= plan.limits.max_batch_size]
    bench = StepBench(plan)
    report(Progress("compile", 0, 1, "step kernels"))
    with torch.inference_mode(), collect() as variants:
        collect_trials(bench, sizes, tops, mode)
    compile_variants(list(variants.values()), plan.device.capability)
    kernels, timings = list(plan.kernels), []
    with torch.inference_mode():
        end, each = time.monotonic(), SECONDS[mode] / sum(SHARES[size] for size in sizes)
        for done, size in enumerate(reversed(sizes)):  # fewest tokens last: what time others leave is for them
            report(Progress("tune step", done, len(sizes), "size", f"tokens={size}"))
            end += each * SHARES[size]
            kernels, timing = _descend(bench, kernels, size, sites(plan, tops.get(size, {}), size, mode), end)
            timings.append(timing)
    report(Progress("tune step", len(sizes), len(sizes), "size"))
    return kernels, timings[::-1]


def collect_trials(bench: StepBench, sizes: Ordered[int], tops: Mapping[int, Mapping[str, Ordered[KernelConfig]]],
                   mode: str) -> None:
    """Launch every candidate once in a step: within ``collect``, all variants that tuning needs."""
    plan = bench.plan
    for size in sizes:
        for site in sites(plan, tops.get(size, {}), size, mode):
            for config in site.candidates:
                bench.launch_once(size, with_choice(plan.kernels, site, config, size, SIZES[size]))


def _descend(bench: StepBench, kernels: list[KernelChoice], size: int, chain: Ordered[Site], end: float
             ) -> tuple[list[KernelChoice], StepTiming]:
    _LOG.debug("%d tokens, until %+.1f s", size, end - time.monotonic())
    before, = bench.microseconds(size, kernels)
    changes: list[str] = []
    for site in chain:
        lengths = contexts(bench.plan, size) if site.op == "attention_decode" else (CONTEXT,)
        held, best = bench.microseconds(size, kernels, lengths), 1.0
        for config in site.candidates:
            if time.monotonic() > end:
                break
            trial = with_choice(kernels, site, config, size, SIZES[size])
            times = bench.microseconds(size, trial, lengths)
            short, *long = (found / its for found, its in zip(times, held, strict=True))
            score = (short + statistics.mean(long)) / 2 if long else short
            _LOG.debug("%d tokens, %s %s: %s %s", size, site.op, site.shape, config.to_json(), times)
            if score < GAIN * best:
                best, kernels = score, trial
                changes.append(f"{site.op} {site.shape}: {config.to_json()} {[round(us, 1) for us in times]} us")
    return kernels, StepTiming(tokens=size, layers=bench.plan.model.num_layers, before=round(before, 2),
                               after=round(bench.microseconds(size, kernels)[0], 2), changes=tuple(changes))


def few_layers(config: Mapping[str, object]) -> dict[str, object]:
    """config.json of the same model with ``LAYERS`` layers."""
    layers = config["num_hidden_layers"]
    assert isinstance(layers, int)
    return {**config, "num_hidden_layers": min(LAYERS, layers)}

