"""Is the candidate as fast as the baseline? Interleaved blocks, a ratio of medians, and the machine's own noise.

Two timings of one commit differ by 5 % or more on a shared machine, because clocks, caches and neighbours drift. So
both are timed in turn within one run, in blocks of A B A B, and the drift meets both alike. The
baseline's own times, block against next block, measure the noise of the machine.

    ratio   median(B) / median(A) over all blocks; above 1 the candidate is slower
    95 %    percentile bootstrap over whole blocks (a block is the unit that drifts), seeded
    floor   what the baseline does to itself: the same ratio between its odd and its even blocks, as the 95th
            percentile of |ratio - 1| over resampled blocks
    limit   1 + margin + floor

PASS when the interval lies below the limit, FAIL when it lies above, INCONCLUSIVE when it straddles it, and when the
floor exceeds the margin: then this machine cannot decide, and says so instead of going red. ``judge_speed`` is pure
over recorded blocks; ``run_blocks`` records them, for two LLMs with ``generation`` as the work.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
from pydantic import Field, model_validator

from calib.scheme import Frozen
from evals.errors import MeasureError
from evals.latency import Point, TimedGenerator, timed
from evals.report import Estimate, Reason, VerdictWord
from evals.workload import Prompts

CHECK = "speed"
_DRAWS = 4000
_MIN_BLOCKS = 8


class Block(Frozen):
    """One A B pair of a run: seconds of the baseline (``a``) and of the candidate (``b``) for the same work.

    ``first`` says which was timed first; the runner alternates, so that neither always meets the warmer cache.
    """

    a: float = Field(gt=0, allow_inf_nan=False)
    b: float = Field(gt=0, allow_inf_nan=False)
    first: str = Field(default="a", pattern="^[ab]$")


class SpeedGate(Frozen):
    """``margin``: how much slower (as a share) the candidate may be, beyond the noise of the machine."""

    margin: float = Field(default=0.05, gt=0, lt=1)
    seed: int = Field(default=0, ge=0)


class SpeedVerdict(Frozen):
    """``ratio`` > 1: slower. ``floor`` is the A/A noise as a share; ``reason`` is the line of a Verdict."""

    reason: Reason
    ratio: Estimate
    floor: float = Field(ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> SpeedVerdict:
        if not self.ratio.ci_low <= self.ratio.ci_high:
            raise ValueError(f"the interval [{self.ratio.ci_low}, {self.ratio.ci_high}] is upside down")
        return self


def judge_speed(blocks: Sequence[Block], gate: SpeedGate | None = None) -> SpeedVerdict:
    """Judge recorded blocks. MeasureError with fewer than 8: no bootstrap speaks about fewer."""
    gate = gate or SpeedGate()
    if len(blocks) < _MIN_BLOCKS:
        raise MeasureError(f"{len(blocks)} blocks were timed, {_MIN_BLOCKS} are needed", "Time more blocks.")
    times = np.array([[block.a, block.b] for block in blocks])
    rng = np.random.default_rng(gate.seed)
    ratio = ratio_of_medians(times)
    low, high = np.quantile(resampled(times, rng), (0.025, 0.975))
    floor = noise_floor(times[:, 0], rng)
    estimate = Estimate(value=ratio, ci_low=float(low), ci_high=float(high), n=len(blocks))
    limit = 1 + gate.margin + floor
    word: VerdictWord = "FAIL" if low > limit else "INCONCLUSIVE" if high >= limit else "PASS"
    found = f"{ratio:.3f} [{low:.3f}, {high:.3f}] times the baseline's time over {len(blocks)} blocks"
    if word != "FAIL" and floor > gate.margin:
        word = "INCONCLUSIVE"
        found += (f"; the baseline differs from itself by {100 * floor:.1f} %, more than the margin: use a quieter "
                  "machine")
    allowed = f"at most {limit:.3f} = 1 + {gate.margin:g} + noise {floor:.3f}"
    return SpeedVerdict(reason=Reason(check=CHECK, word=word, found=found, allowed=allowed), ratio=estimate,
                        floor=floor)


def ratio_of_medians(times: np.ndarray) -> float:
    """median(b) / median(a) of ``times`` [blocks, 2]."""
    a, b = np.median(times, axis=0)
    return float(b / a)


def resampled(times: np.ndarray, rng: np.random.Generator, draws: int = _DRAWS) -> np.ndarray:
    """Ratios of medians of ``draws`` samples of whole blocks with replacement, float64 [draws]."""
    index = rng.integers(len(times), size=(draws, len(times)))
    medians = np.median(times[index], axis=1)
    return medians[:, 1] / medians[:, 0]


def noise_floor(baseline: np.ndarray, rng: np.random.Generator) -> float:
    """95th percentile of |ratio - 1| between the baseline's odd and even blocks, resampled: its A/A noise."""
    half = len(baseline) // 2
    pairs = np.stack([baseline[0:2 * half:2], baseline[1:2 * half:2]], axis=1)
    return float(np.quantile(np.abs(resampled(pairs, rng) - 1.0), 0.95))


def run_blocks(baseline: Callable[[], object], candidate: Callable[[], object], *, blocks: int = 16, warmup: int = 2,
               clock: Callable[[], float] = time.perf_counter) -> list[Block]:
    """Time two pieces of work in turn: ``warmup`` pairs thrown away, then ``blocks`` pairs, A B, B A, A B, ...

    Each is called with nothing and must have finished when it returns (an asynchronous device: synchronise inside).
    MeasureError when the clock does not advance, or jumps backwards, over a call.
    """
    if blocks < _MIN_BLOCKS or warmup < 0:
        raise MeasureError(f"{blocks} blocks and {warmup} warm-up pairs cannot be judged",
                           f"Time at least {_MIN_BLOCKS} blocks.")
    for _ in range(warmup):
        baseline()
        candidate()
    found = []
    for number in range(blocks):
        seconds: dict[str, float] = {}
        order = ("a", "b") if number % 2 == 0 else ("b", "a")
        for name in order:
            begin = clock()
            (baseline if name == "a" else candidate)()
            seconds[name] = clock() - begin
            if seconds[name] <= 0:
                raise MeasureError(f"block {number} took {seconds[name]:g} s by the clock",
                                   "The clock jumped, or the work is too short to be timed.")
        found.append(Block(a=seconds["a"], b=seconds["b"], first=order[0]))
    return found


def generation(llm: TimedGenerator, point: Point, *, seed: int = 0) -> Callable[[], None]:
    """Work for ``run_blocks``: each call generates exactly osl tokens for a fresh batch, of (batch, isl, osl).

    Two of these with one seed and one tokenizer meet the very same prompts, call by call. MeasureError when an output
    has another length.
    """
    batch, isl, osl = point
    prompts, number = Prompts(llm.tokenizer, seed), itertools.count()

    def work() -> None:
        _, outputs = timed(llm, prompts.batch(batch, isl, f"block {next(number)}"), osl)
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        if lengths != [osl] * batch:
            raise MeasureError(f"{batch} outputs of {osl} tokens were asked for, their lengths are {lengths}",
                               "Only equal work may be compared.")

    return work
