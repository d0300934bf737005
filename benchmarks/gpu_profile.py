"""Where the GPU benchmark's time goes, kernel by kernel, and the prompts that it asks."""

from __future__ import annotations

import random
import time
from collections import defaultdict

import torch

from engines.llm import LLM
from engines.request import SamplingParams

START = time.perf_counter()


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - START:6.1f}]", *words, flush=True)


def prompts(batch: int, isl: int) -> list[list[int]]:
    """Seeded ids of ordinary tokens."""
    source = random.Random(batch * 100003 + isl)
    return [[source.randrange(1000, 100000) for _ in range(isl)] for _ in range(batch)]


def recorded(llm: LLM, ids: list[list[int]], tokens: int) -> list[tuple[float, float, str]]:
    """(end, start, name) of every kernel of one call, in order of their ends."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    llm.generate(ids, params)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        llm.generate(ids, params)
    return sorted((event.time_range.end, event.time_range.start, event.name.split("(")[0][:40])
                  for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA)


def profile(llm: LLM, batch: int, isl: int) -> None:
    """Where a decode step's time goes, kernel by kernel.

    With programmatic dependent launch kernels overlap: one that waits for its predecessor looks long. What counts is by
    how much each one moves the end: its own end minus the latest end before it. Kernels are told apart by neighbours.
    """
    spans = recorded(llm, prompts(batch, isl), 9)
    names = [span[2] for span in spans]
    last = max((i for i, name in enumerate(names) if "prefill" in name), default=0)
    first = next(i for i in range(last, len(spans)) if "prepare" in names[i])
    found: dict[str, list[float]] = defaultdict(list)
    for i in range(first + 1, len(spans) - 1):
        found[f"{names[i - 1][:14]} > {names[i]} > {names[i + 1][:14]}"].append(spans[i][0] - spans[i - 1][0])
    steps = max(1, sum("prepare" in name for name in names[first:]))
    say(f"profile batch={batch} isl={isl}, {steps} decode steps: us a step, kernels a step, median us")
    for name, times in sorted(found.items(), key=lambda row: -sum(row[1]))[:26]:
        print(f"    {sum(times) / steps:10.1f} {len(times) / steps:7.1f} {sorted(times)[len(times) // 2]:8.2f}  {name}")


def profile_prefill(llm: LLM, batch: int) -> None:
    """Where the time of ``batch`` prompts of 2048 tokens goes, and how long the device was idle between its kernels."""
    spans = recorded(llm, prompts(batch, 2048), 1)
    found: dict[str, list[float]] = defaultdict(list)
    idle = sum(max(0.0, spans[i][1] - spans[i - 1][0]) for i in range(1, len(spans)))
    for i in range(1, len(spans) - 1):
        found[f"{spans[i][2]} > {spans[i + 1][2][:14]}"].append(spans[i][0] - max(spans[i - 1][0], spans[i][1]))
    say(f"profile of prefill, batch={batch}: {(spans[-1][0] - spans[0][1]) / 1e3:.2f} ms, idle {idle / 1e3:.2f} ms")
    for name, times in sorted(found.items(), key=lambda row: -sum(row[1]))[:14]:
        print(f"    {sum(times) / 1e3:10.2f} ms {len(times):6d}  {name}")
