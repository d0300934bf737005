"""The whole step, tuned in company: every kernel's candidates inside a decode step of the real program.

A kernel that wins alone may lose in the chain: what it leaves in L2, how early its successor can start loading weights,
how many programs it keeps from it. At one token a layer is a chain of ten kernels of a few microseconds, so that is
where it counts. So the first layers of the program are bound exactly as the runtime binds them (random weights, a cache
with some context), captured as a CUDA graph, and one kernel after the other tries its candidates while the others stand
still at the best known. Linears bring the best few of their own timings. Every candidate is compiled before, so that a
trial takes some 30 ms; one that wins is measured a second time, beside the best known, before it is believed.

Few sequences have two graphs, for short and for long contexts; each has decode attention of its own, and the second is
taken from the context where that costs least over all contexts that are timed (``switch``).

Deterministic engines keep their first choices: theirs are constrained over all step sizes.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import torch

from calib.progress import Progress, Report
from calib.scheme import Frozen
from engines.build.impls import group_of
from engines.build.kernel_table import FEW, entry, mode_of, rotate_themselves, silu_shape
from engines.build.step_bench import CONTEXT, StepBench, contexts
from engines.kernels import attention_decode, norm, quantize, read_ahead, silu_mul
from engines.kernels.compile_ahead import collect, compile_variants, late
from engines.kernels.impl import KernelConfig
from engines.plan import KernelChoice, Plan, linear_shape
from engines.program import GatedSilu

_LOG = logging.getLogger(__name__)
#: Step sizes that are tuned -> the largest step that takes their choices.
SIZES = {1: FEW, 8: 16, 32: 64, 128: 256}
SECONDS = {"quick": 32.0, "full": 96.0}
#: Parts of that, by step size: at one token most kernels can gain, and contexts are longest.
SHARES = {1: 5, 8: 2, 32: 1, 128: 1}
#: The longest context at which attention is timed for the graph of short ones, where there are two.
SHORT = 1024
#: The contexts from which the other one may be taken.
SWITCHES = tuple(1 << power for power in range(9, 16))
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
    lengths: tuple[int, ...] = (CONTEXT,)

    @property
    def long(self) -> bool:
        """Whether it is a kernel of the graph for long contexts alone."""
        return self.shape == "long"


def sites(plan: Plan, tops: Mapping[str, Ordered[KernelConfig]], size: int) -> list[Site]:
    """What may be changed in a step of ``size`` tokens, what matters most first. ``tops``: a linear's best configs by
    shape."""
    facts, model = plan.device.facts, plan.model
    kv_bytes = 1 if plan.kv.quantized else 2
    found = []
    if size <= READ_AHEAD:
        found.append(Site("read_ahead", "weights", tuple(read_ahead.candidates(facts, size))))
    fused, (short, *long) = rotate_themselves(model, plan.program), contexts(plan, size)
    two = fused and size <= FEW and max(long, default=0) >= SWITCHES[0]
    others = attention_decode.long_candidates(model.head_dim, kv_bytes, facts) if two else ()
    found.append(Site("attention_decode", "split", tuple(attention_decode.candidates(
        model.head_dim, plan.limits.block_size, kv_bytes, facts, batch=size, fused=fused)),
        (short, min(SHORT, long[0])) if others else (short, *long)))
    if others:
        found.append(Site("attention_decode", "long", tuple(taken_from(config, CONTEXT) for config in others),
                          tuple(long)))
    for op in {silu_shape(op): op for op in plan.program.ops if isinstance(op, GatedSilu)}.values():
        grid = None if op.quant is None else op.quant.grid
        found.append(Site("silu_mul", silu_shape(op), tuple(silu_mul.candidates(
            op.width, mode_of(grid), 0 if grid is None else group_of(grid), facts))))
    found.append(Site("norm", f"n={model.hidden_size}", tuple(norm.candidates(model.hidden_size, facts))))
    if any(op.op == "quantize" for op in plan.program.ops):
        found.append(Site("quantize", "any", tuple(quantize.candidates(model.hidden_size, facts))))
    body = {linear_shape(op) for op in plan.program.linears()[:-1]}
    return found + [Site("linear", shape, tuple(configs)) for shape, configs in tops.items() if shape in body]


def taken_from(config: KernelConfig, context: int) -> KernelConfig:
    """A config for long contexts that is taken from ``context`` tokens on."""
    return KernelConfig.from_json(config.to_json() | {"meta": dict(config.meta) | {"FROM": context}})


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
        collect_trials(bench, sizes, tops)
    compile_variants(list(variants.values()), plan.device.capability)
    kernels, timings = list(plan.kernels), []
    with torch.inference_mode(), late():
        end, each = time.monotonic(), SECONDS[mode] / sum(SHARES[size] for size in sizes)
        for done, size in enumerate(reversed(sizes)):  # fewest tokens last: what time others leave is for them
            report(Progress("tune step", done, len(sizes), "size", f"tokens={size}"))
            end += each * SHARES[size]
            kernels, timing = _descend(bench, kernels, size, sites(plan, tops.get(size, {}), size), end)
            timings.append(timing)
    report(Progress("tune step", len(sizes), len(sizes), "size"))
    return kernels, timings[::-1]


def collect_trials(bench: StepBench, sizes: Ordered[int], tops: Mapping[int, Mapping[str, Ordered[KernelConfig]]]
                   ) -> None:
    """Launch every candidate once in a step: within ``collect``, all variants that tuning needs."""
    plan = bench.plan
    for size in sizes:
        for site in sites(plan, tops.get(size, {}), size):
            for config in site.candidates:
                bench.launch_once(size, with_choice(plan.kernels, site, config, size, SIZES[size]), site.long)


def _descend(bench: StepBench, kernels: list[KernelChoice], size: int, chain: Ordered[Site], end: float
             ) -> tuple[list[KernelChoice], StepTiming]:
    _LOG.debug("%d tokens, until %+.1f s", size, end - time.monotonic())
    before, = bench.microseconds(size, kernels)
    changes: list[str] = []

    def measure(table: Ordered[KernelChoice], site: Site) -> list[float]:
        return bench.microseconds(size, table, site.lengths, site.long)

    for site in chain:
        if site.long:
            kernels = with_choice(kernels, site, site.candidates[0], size, SIZES[size])
        held = measure(kernels, site)
        for config in site.candidates:
            if time.monotonic() > end:
                break
            trial = with_choice(kernels, site, config, size, SIZES[size])
            times = measure(trial, site)
            _LOG.debug("%d tokens, %s %s: %s %s", size, site.op, site.shape, config.to_json(), times)
            if _score(times, held) >= GAIN:
                continue
            again, times = measure(kernels, site), measure(trial, site)
            if _score(times, again) < GAIN:
                kernels, held = trial, times
                changes.append(f"{site.op} {site.shape}: {config.to_json()} {[round(us, 1) for us in times]} us")
    if any(site.long for site in chain):
        kernels, change = _switch(bench, kernels, size)
        changes.append(change)
    return kernels, StepTiming(tokens=size, layers=bench.plan.model.num_layers, before=round(before, 2),
                               after=round(bench.microseconds(size, kernels)[0], 2), changes=tuple(changes))


def _score(times: Ordered[float], held: Ordered[float]) -> float:
    """Time by time in parts of what is held; the shortest context counts as much as all others together."""
    short, *long = (found / its for found, its in zip(times, held, strict=True))
    return (short + statistics.mean(long)) / 2 if long else short


def _switch(bench: StepBench, kernels: list[KernelChoice], size: int) -> tuple[list[KernelChoice], str]:
    """The table whose graph for long contexts is taken from where that is best, or without that graph."""
    longest = max(contexts(bench.plan, size))
    lengths = [length for length in SWITCHES if length < longest] + [longest]
    short, long = bench.microseconds(size, kernels, lengths), bench.microseconds(size, kernels, lengths, long=True)
    begin = switch(lengths, short, long)
    shown = f"{lengths} tokens: {[round(us, 1) for us in short]} and {[round(us, 1) for us in long]} us"
    choice = next(each for each in kernels if (each.op, each.shape) == ("attention_decode", "long"))
    kernels = [each for each in kernels if (each.op, each.shape) != ("attention_decode", "long")]
    if begin is None:
        return kernels, f"attention_decode long: never, {shown}"
    config = taken_from(KernelConfig.from_json(choice.config or {}), begin)
    return [*kernels, entry("attention_decode", "long", SIZES[size], config)], (
        f"attention_decode long: from {begin} tokens, {shown}")


def switch(lengths: Ordered[int], short: Ordered[float], long: Ordered[float]) -> int | None:
    """The one of ascending ``lengths`` from which on ``long`` is to be taken, None for never: with that choice the
    times are least, each in parts of the better one (one length's noise does not decide)."""
    best = [min(pair) for pair in zip(short, long, strict=True)]

    def cost(begin: int) -> float:
        return sum(its / least for its, least in zip([*short[:begin], *long[begin:]], best, strict=True))
    begin = min(range(len(lengths), -1, -1), key=cost)
    return lengths[begin] if begin < len(lengths) else None


def few_layers(config: Mapping[str, object]) -> dict[str, object]:
    """config.json of the same model with ``LAYERS`` layers."""
    layers = config["num_hidden_layers"]
    assert isinstance(layers, int)
    return {**config, "num_hidden_layers": min(LAYERS, layers)}

