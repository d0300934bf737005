"""Greedy and random sampling from logits, without a sort and without the host.

Per row: ``temperature`` T (0 = greedy), ``top_k`` (0 = off), ``top_p`` (1 = off), ``min_p`` (0 = off), and a random
stream of its own, Philox keyed by ``seed`` and counted by (vocabulary index, position, round): the draw of a row does
not depend on its batch mates, on the batch's size or on earlier draws.

**What is kept.** With p = softmax(x / T), token i stays if (Hugging Face's order: each rule renormalises)

    top-k   fewer than k tokens have a larger logit (ties with the k-th all stay)
    top-p   the tokens of larger logit hold less than top_p of the mass of the top-k set (ties all stay)
    min-p   p_i >= min_p * max p

Each rule keeps an upper set {x >= threshold}. That is why no sort is needed:

**Draw first, ask after.** argmax(x_i / T - log q_i) with q_i ~ Exp(1) is a draw from softmax(x / T) (the Gumbel trick
in its exponential form, which keeps full resolution in the tail that wins). Pass 1 draws from the whole vocabulary
while it finds maxima and sums. Pass 2 counts the tokens above the drawn one and their mass; if they show that it is
outside a rule's set, it draws again, with fresh noise, among the tokens *strictly above* it: still a superset of the
kept set, so the accepted draw has exactly the kept distribution. A draw is accepted with probability >= top_p, so
rounds are few. Only when top-k and top-p are both on, the k-th largest logit is searched first (bisection between
actual elements).

**Two kernels.** ``partial_kernel``: [rows, parts] programs, PART logits each -> per part (max, min, sum at T = 1, sum
at T, best score, its index). ``choose_kernel``: one program a row merges them; greedy and unrestricted rows are done.
Restricted rows re-read only parts whose max is above the drawn logit: usually a few.

Greedy ties go to the lowest index. ``logprob`` is log softmax(x)[token] of the logits as given, at T = 1 before any
rule (OpenAI's meaning). Penalties and masks are another kernel's job, added to the logits before (-inf = banned). A row
without a finite maximum (NaN, +inf, or all banned) gives token -1 and logprob NaN: a fault the caller sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engines.kernels.impl import DeviceFacts, KernelConfig
from engines.kernels.jit import gdc_launch, gdc_wait, launch_options, next_pow2
from engines.kernels.sample_twin import draw, kept

STATS = 5
_NO_INDEX = tl.constexpr(2147483647)


@triton.jit
def _exponential(seed, start, position, turn, SIZE: tl.constexpr) -> tl.tensor:
    """q ~ Exp(1) for vocabulary indices start .. start + SIZE (start a multiple of 4): one Philox call for four."""
    quad = (start // 4 + tl.arange(0, SIZE // 4)).to(tl.uint32)
    zero = quad * 0
    r0, r1, r2, r3 = tl.philox(seed, quad, zero + position.to(tl.uint32), zero + turn.to(tl.uint32), zero)
    bits = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), (SIZE,))
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    return tl.where(v < 1e-3, v + 0.5 * v * v, -tl.log(1.0 - v))


@triton.jit
def _best(score, index):
    """The largest score and the lowest index that has it."""
    top = tl.max(score, 0)
    return top, tl.min(tl.where(score == top, index, _NO_INDEX), 0)


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "seeds_ptr", "positions_ptr"])
def partial_kernel(logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, stats_ptr, index_ptr, stride, vocab, parts,
                   PART: tl.constexpr, PDL: tl.constexpr) -> None:
    """One program a (row, part)."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    index = part * PART + tl.arange(0, PART)
    gdc_launch(PDL)
    gdc_wait(PDL)
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    largest = tl.max(x, 0)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    smallest = tl.min(tl.where(x == float("-inf"), float("inf"), x), 0)
    total = tl.sum(tl.exp(x - safe), 0)
    heated = total
    best, winner = _best(x, index)
    if temperature > 0.0:
        heated = tl.sum(tl.exp((x - safe) / temperature), 0)
        noise = _exponential(tl.load(seeds_ptr + row), part * PART, tl.load(positions_ptr + row), row * 0, PART)
        best, winner = _best(x / temperature - tl.log(noise), index)
    out = stats_ptr + (row.to(tl.int64) * parts + part) * 5
    tl.store(out, largest)
    tl.store(out + 1, smallest)
    tl.store(out + 2, total)
    tl.store(out + 3, heated)
    tl.store(out + 4, best)
    tl.store(index_ptr + row.to(tl.int64) * parts + part, winner)


@triton.jit
def _kth_largest(base, stats, largest, smallest, k, vocab, parts, PART: tl.constexpr):
    """The k-th largest of the row (ties counted singly); the smallest finite one where fewer than k are finite."""
    low = smallest
    high = largest
    searching = low < high
    while searching:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)
        above_low = tl.zeros((PART,), tl.int32)
        above_middle = tl.zeros((PART,), tl.int32)
        up = tl.full((PART,), float("inf"), tl.float32)
        down = tl.full((PART,), float("-inf"), tl.float32)
        for part in range(parts):
            if tl.load(stats + part * 5) > low:
                index = part * PART + tl.arange(0, PART)
                x = tl.load(base + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
                above_low += (x > low).to(tl.int32)
                above_middle += (x >= middle).to(tl.int32)
                up = tl.minimum(up, tl.where(x >= middle, x, float("inf")))
                down = tl.maximum(down, tl.where(x < middle, x, float("-inf")))
        if tl.sum(above_low, 0) < k:
            high = low
        elif tl.sum(above_middle, 0) >= k:
            low = tl.min(up, 0)
        else:
            high = tl.max(down, 0)
        searching = low < high
    return low


@triton.jit
def _mass_from(base, stats, threshold, largest, temperature, vocab, parts, PART: tl.constexpr):
    """Sum of exp((x - largest) / T) over x >= threshold."""
    mass = tl.zeros((PART,), tl.float32)
    for part in range(parts):
        if tl.load(stats + part * 5) >= threshold:
            index = part * PART + tl.arange(0, PART)
            x = tl.load(base + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
            mass += tl.where(x >= threshold, tl.exp((x - largest) / temperature), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _round(base, stats, drawn, floor, largest, temperature, seed, position, turn, vocab, parts, PART: tl.constexpr):
    """Count and mass of the tokens strictly above ``drawn``, and a fresh draw among those of them at or above floor."""
    count = tl.zeros((PART,), tl.int32)
    mass = tl.zeros((PART,), tl.float32)
    score = tl.full((PART,), float("-inf"), tl.float32)
    where = tl.full((PART,), _NO_INDEX, tl.int32)
    for part in range(parts):
        if tl.load(stats + part * 5) > drawn:
            index = part * PART + tl.arange(0, PART)
            x = tl.load(base + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
            above = x > drawn
            count += above.to(tl.int32)
            mass += tl.where(above, tl.exp((x - largest) / temperature), 0.0)
            noise = _exponential(seed, part * PART, position, turn, PART)
            fresh = tl.where(above & (x >= floor), x / temperature - tl.log(noise), float("-inf"))
            where = tl.where(fresh > score, index, where)
            score = tl.maximum(score, fresh)
    _, winner = _best(score, where)
    return tl.sum(count, 0), tl.sum(mass, 0), winner


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr",
                                            "positions_ptr", "token_ptr", "logprob_ptr"])
def choose_kernel(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, stats_ptr,
                  index_ptr, token_ptr, logprob_ptr, stride, vocab, parts, PART: tl.constexpr, PARTS: tl.constexpr,
                  PDL: tl.constexpr) -> None:
    """One program a row. PARTS >= parts."""
    row = tl.program_id(0)
    gdc_launch(PDL)
    gdc_wait(PDL)
    stats = stats_ptr + row.to(tl.int64) * parts * 5
    part = tl.arange(0, PARTS)
    known = part < parts
    base = logits_ptr + row.to(tl.int64) * stride
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    maxima = tl.load(stats + part * 5, mask=known, other=float("-inf"))
    totals = tl.load(stats + part * 5 + 2, mask=known, other=0.0)
    heats = tl.load(stats + part * 5 + 3, mask=known, other=0.0)
    scores = tl.load(stats + part * 5 + 4, mask=known, other=float("-inf"))
    winners = tl.load(index_ptr + row.to(tl.int64) * parts + part, mask=known, other=_NO_INDEX)
    largest = tl.max(maxima, 0)
    some = maxima > float("-inf")
    total = tl.sum(tl.where(some, totals * tl.exp(maxima - largest), totals * 0.0), 0)
    _, token = _best(scores, winners)
    sound = (total > 0.0) & (largest < float("inf"))
    limited = ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0)
    if sound & limited & (temperature > 0.0):
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row)
        k = tl.where((top_k > 0) & (top_k < vocab), top_k, vocab)
        mass_kept = tl.sum(tl.where(some, heats * tl.exp((maxima - largest) / temperature), 0.0), 0)
        if (k < vocab) & (top_p < 1.0):
            smallest = tl.min(tl.load(stats + part * 5 + 1, mask=known, other=float("inf")), 0)
            kth = _kth_largest(base, stats, largest, smallest, k, vocab, parts, PART)
            mass_kept = _mass_from(base, stats, kth, largest, temperature, vocab, parts, PART)
        floor = tl.where(min_p > 0.0, largest + temperature * tl.log(min_p), float("-inf"))
        limit = tl.where(top_p < 1.0, top_p * mass_kept, float("inf"))
        turn = row * 0
        drawing = True
        while drawing:
            turn += 1
            drawn = tl.load(base + token).to(tl.float32)
            count, mass, fresh = _round(base, stats, drawn, floor, largest, temperature, seed, position, turn, vocab,
                                        parts, PART)
            drawing = (count > 0) & ((count >= k) | (mass >= limit) | (drawn < floor))
            token = tl.where(drawing, fresh, token)
    if sound:
        logprob = tl.load(base + token).to(tl.float32) - largest - tl.log(total)
    else:
        token = -1
        logprob = float("nan")
    tl.store(token_ptr + row, token)
    tl.store(logprob_ptr + row, logprob)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Per-row parameters, all [rows] on the device: float32 temperature, top_p, min_p; int32 top_k; int64 seeds and
    positions."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    def check(self, rows: int) -> None:
        """Raise ValueError where a tensor has another shape or dtype."""
        wanted = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32,
                  "seeds": torch.int64, "positions": torch.int64}
        for name, dtype in wanted.items():
            found = getattr(self, name)
            if found.shape != (rows,) or found.dtype != dtype:
                raise ValueError(f"{name} must be {dtype} [{rows}], found {found.dtype} {tuple(found.shape)}")


def candidates(vocab: int, device: DeviceFacts) -> Sequence[KernelConfig]:
    """Parts to try; the first is the default. Every part size gives the same draws."""
    pdl = device.capability >= 90
    small = min(8192, max(32, next_pow2(vocab)))
    return [KernelConfig.of("two_pass", PART=p, WARPS2=w, num_warps=max(1, min(8, p // 512)), pdl=pdl)
            for p, w in dict.fromkeys(((small, max(1, min(16, small // 256))), (max(32, small // 2), 8), (small, 8)))]


def workspace(rows: int, vocab: int, config: KernelConfig, device: torch.device | str
              ) -> tuple[torch.Tensor, torch.Tensor]:
    """(stats float32 [rows, parts, 5], index int32 [rows, parts])."""
    parts = triton.cdiv(vocab, config["PART"])
    return (torch.empty(rows, parts, STATS, dtype=torch.float32, device=device),
            torch.empty(rows, parts, dtype=torch.int32, device=device))


def launch(logits: torch.Tensor, rows: SamplingRows, tokens: torch.Tensor, logprobs: torch.Tensor,
           work: tuple[torch.Tensor, torch.Tensor], config: KernelConfig) -> None:
    """Fill ``tokens`` [m] int32 or int64 and ``logprobs`` [m] float32 from ``logits`` [m, vocab]. Graph safe."""
    m, vocab = logits.shape
    rows.check(m)
    stats, index = work
    parts = triton.cdiv(vocab, config["PART"])
    if stats.shape[0] < m or stats.shape[1:] != (parts, STATS) or tokens.shape != (m,) or logprobs.shape != (m,):
        raise ValueError(f"workspace {tuple(stats.shape)}, tokens {tuple(tokens.shape)} and logprobs "
                         f"{tuple(logprobs.shape)} do not fit logits {tuple(logits.shape)} in {parts} parts")
    if not m:
        return
    options = launch_options(config)
    partial_kernel[(m, parts)](logits, rows.temperature, rows.seeds, rows.positions, stats, index, logits.stride(0),
                               vocab, parts, PART=config["PART"], **options)
    options["num_warps"] = config["WARPS2"]
    choose_kernel[(m,)](logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, rows.positions, stats,
                        index, tokens, logprobs, logits.stride(0), vocab, parts, PART=config["PART"],
                        PARTS=next_pow2(parts), **options)


def twin(logits: torch.Tensor, rows: SamplingRows, tokens: torch.Tensor, logprobs: torch.Tensor,
         work: tuple[torch.Tensor, torch.Tensor] | None = None, config: KernelConfig | None = None) -> None:
    """The same draws in plain torch (tokens can differ only where two scores agree to rounding)."""
    rows.check(logits.shape[0])
    for i, x in enumerate(logits.float()):
        heat = float(rows.temperature[i])
        largest = x.max()
        if not bool(torch.isfinite(largest)):
            tokens[i], logprobs[i] = -1, float("nan")
            continue
        token = int(torch.argmax(x))
        if heat > 0.0:
            allowed = kept(x, heat, int(rows.top_k[i]), float(rows.top_p[i]), float(rows.min_p[i]))
            token = draw(x, heat, allowed, largest + heat * torch.log(rows.min_p[i]), int(rows.seeds[i]),
                         int(rows.positions[i]))
        tokens[i] = token
        logprobs[i] = torch.log_softmax(x, 0)[token]
