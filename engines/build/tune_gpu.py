"""Which kernel runs each linear at each step size, timed on the GPU itself; kept in a tuning cache.

**Points.** For every distinct linear (shape and grids) and every step size of ``SIZES``: the Impl's candidates, Triton
variants and torch's own operators alike. All variants are compiled first, on all cores (``kernels/compile_ahead``).

**Timing** imitates how the kernel will run: a CUDA graph of launches, each on another copy of the weight (400 MB in
all, so that nothing is found in L2), programmatic dependent launch as configured; the median of a few replays. For
many tokens a gate_up linear is timed together with its activation. A candidate whose results are not the twin's
(beyond 256 rows: some of each tile), or not those of the ones before it, is dropped, and said so.

What wins alone may lose in company: ``tune_step`` lets the best few compete again inside whole decode steps.

**Deterministic** engines hold BLOCK_K and SPLIT_K of a linear constant over all step sizes (a row's sum then does not
depend on its batch): one kernel, one pair, that which costs least over all sizes.

``none`` takes every first candidate. ``quick`` times the first few of each, ``full`` all; both stop timing when their
seconds are used up and take first candidates from there on. Entries of the cache are not timed again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from calib.progress import Progress, Report
from calib.scheme import Frozen
from engines.build.bench_gpu import Bench
from engines.build.gpu_linears import impl_for, shape_of, weight_bytes
from engines.build.kernel_table import silu_shape
from engines.build.tuning_cache import TuningCache
from engines.device import Device
from engines.errors import EngineError
from engines.kernels.compile_ahead import collect, compile_variants, late
from engines.kernels.impl import KernelConfig
from engines.plan import KernelChoice, linear_shape
from engines.program import Linear, Program
from engines.runtime.cuda.neighbours import attention_groups

#: Step sizes with choices of their own; a step takes the next larger one's.
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: The output layer sees sampled rows only.
HEAD_SIZES = SIZES[:9]
SECONDS = {"quick": 60.0, "full": 240.0}
CANDIDATES = {"quick": 6, "full": 64}
#: How many of a linear's configs compete again in the chain.
TOPS = 3
#: A dot tile of this many tokens serves larger steps too.
DOT_TOKENS = 256

Mode = Literal["none", "quick", "full"]


class GpuTiming(Frozen):
    """Evidence: the chosen kernel of a linear at one step size. Times are None where nothing was timed.

    ``floor_fraction`` is the time of reading the weight once at the device's copy bandwidth over the time measured.
    ``contenders``: the chosen one and others near it, which compete again in the chain.
    """

    shape: str
    tokens: int
    config: dict[str, Any]
    microseconds: float | None
    runner_up: dict[str, Any] | None = None
    runner_up_microseconds: float | None = None
    floor_fraction: float | None = None
    candidates: int = 1
    dropped: int = 0
    contenders: tuple[dict[str, Any], ...] = ()


#: What decides how a row is summed and rounded, whatever its batch: BLOCK_K, SPLIT_K, and four bits' FOLD.
Sums = tuple[int, int, int]


def sizes_for(op: Linear, head: Linear, max_num_tokens: int) -> tuple[int, ...]:
    """Step sizes of a linear: up to the first that holds the largest step."""
    sizes = HEAD_SIZES if op is head else SIZES
    return tuple(size for index, size in enumerate(sizes) if index == 0 or sizes[index - 1] < max_num_tokens)


def candidates_for(op: Linear, tokens: int, device: Device, deterministic: bool) -> list[KernelConfig]:
    """What may run a linear at a step size, best guess first. EngineError when nothing can."""
    impl = impl_for(op)

    def dots(count: int) -> list[KernelConfig]:
        return [config for config in impl.candidates(shape_of(op, count), device.facts) if config.kernel == "dot"]

    if deterministic:  # four bits offer no dot for a few tokens: the one of 16 takes them too
        found = dots(min(tokens, DOT_TOKENS)) or dots(16)
    else:
        found = list(impl.candidates(shape_of(op, tokens), device.facts))
    if not found:
        raise EngineError(f"{op.parts[0]} (n={op.n}, k={op.k}) has no kernel at {tokens} tokens",
                          "Leave this layer unquantized, or build without deterministic.")
    return found


@dataclass(frozen=True, slots=True)
class Tuned:
    """Choices, evidence, and the configs that are worth trying in company: step size -> linear shape -> the best."""

    choices: list[KernelChoice]
    timings: list[GpuTiming]
    tops: dict[int, dict[str, list[KernelConfig]]]


class _Tuner:
    """One run over all points."""

    def __init__(self, program: Program, device: Device, mode: Mode, max_num_tokens: int, deterministic: bool,
                 cache: Path | None, report: Report) -> None:
        self.device, self.mode, self.deterministic, self.report = device, mode, deterministic, report
        head = program.linears()[-1]
        self.linears = {linear_shape(op): op for op in program.linears()}
        self.points = [(op, tokens) for op in self.linears.values()
                       for tokens in sizes_for(op, self.linears[linear_shape(head)], max_num_tokens)]
        self.activations = {linear_shape(group.op): group.silu for group in attention_groups(program.ops)
                            if isinstance(group.op, Linear) and group.silu is not None}
        self.cache = TuningCache(None if mode == "none" else cache, "tuning-gpu", device, GpuTiming)
        self.known = self.cache.read()
        self.timed = mode != "none" and device.kind == "cuda"

    def key(self, op: Linear, tokens: int) -> str:
        silu = self.activations.get(linear_shape(op))
        behind = "" if silu is None else f" then {silu_shape(silu)}"
        return f"{linear_shape(op)} tokens={tokens} {self.mode}{behind}{' deterministic' if self.deterministic else ''}"

    def candidates(self, op: Linear, tokens: int) -> list[KernelConfig]:
        found = candidates_for(op, tokens, self.device, self.deterministic)
        return found[:CANDIDATES[self.mode]] if self.timed and not self.deterministic else found

    def run(self) -> list[GpuTiming]:
        wanted = [(op, tokens) for op, tokens in self.points if self.key(op, tokens) not in self.known]
        if self.timed and wanted:
            with torch.inference_mode(), late():
                self._time(wanted)
        elif not self.timed:
            for op, tokens in wanted:
                self._keep(op, tokens, [(config, None) for config in self._untimed(op, tokens)], 0)
        self.cache.add(self.known)
        return [self.known[self.key(op, tokens)] for op, tokens in self.points]

    def _untimed(self, op: Linear, tokens: int) -> list[KernelConfig]:
        """First candidates; in deterministic mode one way of summing for all sizes, that which stands first most."""
        found = self.candidates(op, tokens)
        if not self.deterministic:
            return found
        pairs = [[_sums(config) for config in self.candidates(op, size)] for other, size in self.points if other is op]
        common = set.intersection(*map(set, pairs))
        if not common:
            raise EngineError(f"{op.parts[0]} has no kernel that sums alike at all step sizes",
                              "Build without deterministic.")
        held = min(sorted(common), key=lambda pair: sum(row.index(pair) for row in pairs))
        return [config for config in found if _sums(config) == held][:1]

    def _time(self, wanted: list[tuple[Linear, int]]) -> None:
        end = time.monotonic() + SECONDS[self.mode]
        bench = Bench(self.device, self.activations)
        self._compile(bench, wanted)
        ranked: dict[tuple[str, int], list[tuple[KernelConfig, float | None]]] = {}
        for done, (op, tokens) in enumerate(wanted):
            self.report(Progress("tune", done, len(wanted), "point", f"{linear_shape(op)} tokens={tokens}"))
            candidates, dropped = self.candidates(op, tokens), 0
            if time.monotonic() < end:
                times, dropped = bench.race(op, tokens, candidates)
                ranked[linear_shape(op), tokens] = list(times)
            else:
                ranked[linear_shape(op), tokens] = [(config, None) for config in candidates]
            self._keep(op, tokens, ranked[linear_shape(op), tokens], dropped, bench.bandwidth)
        if self.deterministic:
            self._hold_pairs(ranked, bench)
        self.report(Progress("tune", len(wanted), len(wanted), "point"))

    def _compile(self, bench: Bench, wanted: list[tuple[Linear, int]]) -> None:
        """All variants of all points on all cores. Those that do not compile are dropped when they are raced."""
        self.report(Progress("compile", 0, 1, "kernels"))
        with collect() as variants:
            for op, tokens in wanted:
                for config in self.candidates(op, tokens):
                    bench.launch_once(op, tokens, config)
        compile_variants(list(variants.values()), self.device.capability)
        self.report(Progress("compile", 1, 1, "kernels", f"{len(variants)} variants"))

    def _keep(self, op: Linear, tokens: int, ranked: Sequence[tuple[KernelConfig, float | None]], dropped: int,
              bandwidth: float | None = None) -> None:
        (config, best), second = ranked[0], ranked[1] if len(ranked) > 1 else (None, None)
        fraction = None if best is None or bandwidth is None else weight_bytes(op) / bandwidth / (best * 1e-6)
        self.known[self.key(op, tokens)] = GpuTiming(
            shape=linear_shape(op), tokens=tokens, config=config.to_json(), microseconds=_rounded(best),
            runner_up=None if second[0] is None else second[0].to_json(), runner_up_microseconds=_rounded(second[1]),
            floor_fraction=None if fraction is None else round(fraction, 4), candidates=len(ranked) + dropped,
            dropped=dropped, contenders=tuple(each.to_json() for each, _ in candidates_of(ranked)))

    def _hold_pairs(self, ranked: dict[tuple[str, int], list[tuple[KernelConfig, float | None]]], bench: Bench) -> None:
        """Deterministic: one way of summing a linear, that which costs least over all sizes."""
        for shape, op in self.linears.items():
            rows = {tokens: found for (its, tokens), found in ranked.items() if its == shape}
            if not rows:
                continue
            common = set.intersection(*({_sums(config) for config, _ in found} for found in rows.values()))
            if not common:
                raise EngineError(f"{op.parts[0]} has no kernel that sums alike at all step sizes",
                                  "Build without deterministic.")

            def cost(sums: Sums, rows: dict[int, list[tuple[KernelConfig, float | None]]] = rows) -> float:
                return sum(min(us or math.inf for config, us in found if _sums(config) == sums) / (found[0][1] or 1.0)
                           for found in rows.values())
            held = min(sorted(common), key=cost)
            for tokens, found in rows.items():
                self._keep(op, tokens, [entry for entry in found if _sums(entry[0]) == held], 0, bench.bandwidth)


def candidates_of(ranked: Sequence[tuple[KernelConfig, float | None]]) -> Sequence[tuple[KernelConfig, float | None]]:
    """The best few that are within 15 % of the best."""
    best = ranked[0][1]
    return [entry for entry in ranked[:TOPS] if best is None or (entry[1] or 0.0) < 1.15 * best]


def _sums(config: KernelConfig) -> Sums:
    return config["BLOCK_K"], config["SPLIT_K"], dict(config.meta).get("FOLD", 0)


def _rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 3)


def tune_gpu(program: Program, device: Device, mode: Mode, max_num_tokens: int, deterministic: bool, cache: Path | None,
             report: Report) -> Tuned:
    """The choice for every distinct linear and step size of a program, and the timings behind it."""
    tuner = _Tuner(program, device, mode, max_num_tokens, deterministic, cache, report)
    timings = tuner.run()
    linears = {linear_shape(op): op for op in program.linears()}
    picked = [KernelChoice(op="linear", shape=timing.shape, max_tokens=timing.tokens,
                           impl=impl_for(linears[timing.shape]).name, config=timing.config) for timing in timings]
    tops: dict[int, dict[str, list[KernelConfig]]] = {}
    for timing in timings:
        configs = [KernelConfig.from_json(each) for each in timing.contenders]
        tops.setdefault(timing.tokens, {})[timing.shape] = configs
    return Tuned(picked, timings, tops)
