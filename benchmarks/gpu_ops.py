"""Times every kernel that is not a linear on this GPU: norm, rope + cache write, gated activation, attention, sampling.

    python -m benchmarks.gpu_ops --json out.json [--only norm decode ...] [--workers 14]

Shapes are Llama-3.1-8B's (hidden 4096, 32/8 heads of 128, inter 14336, vocabulary 128256). A point is a CUDA graph of
launches over rotating buffers (decode attention: block tables that together exceed L2), replayed; the value is the
median replay per launch, so neighbouring launches overlap through PDL as they do in an engine's step. Outputs are
poisoned and compared with the plain-torch twin before timing; a wrong one ends the run.

With ``--workers`` the variants are first compiled by that many child processes (each runs its share of the points on
tiny problems). Decode attention's ``floor`` is the KV bytes at 4.27 TB/s; prefill's peer is torch's SDPA.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu_ops_attention import decode_points, prefill_points
from benchmarks.gpu_ops_points import Point, embedding_points, norm_points, rope_points, sample_points, silu_points
from engines.kernels.impl import DeviceFacts, KernelConfig

FAMILIES = {"norm": norm_points, "silu_mul": silu_points, "rope_kv": rope_points, "embedding": embedding_points,
            "decode": decode_points, "prefill": prefill_points, "sample": sample_points}
START = time.time()


def say(*words: object) -> None:
    print(f"[{time.time() - START:6.1f}]", *words, flush=True)


def graph_us(launches: Sequence[Callable[[], object]], replays: int = 9) -> list[float]:
    """Microseconds per launch of each replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
        graph.replay()
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
        for begin, end in marks:
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 / len(launches) for begin, end in marks]


def device_facts() -> DeviceFacts:
    p = torch.cuda.get_device_properties(0)
    shared = triton.runtime.driver.active.utils.get_device_properties(0)["max_shared_mem"]
    return DeviceFacts(p.name, p.major * 10 + p.minor, p.multi_processor_count, shared, p.L2_cache_size)


def compile_all(only: Sequence[str], workers: int) -> None:
    """Fill the compiler's disk cache: each child runs every ``workers``-th tiny point."""
    children = [subprocess.Popen([sys.executable, "-m", "benchmarks.gpu_ops", "--only", *only, "--share",
                                  f"{i}/{workers}"])
                for i in range(workers)]
    for child in children:
        try:
            if child.wait(timeout=150):
                raise SystemExit(f"a compile child ended with {child.returncode}")
        except subprocess.TimeoutExpired:
            child.kill()
            say("a compile child took over 150 s and was stopped; its variants compile while timing")


def run_share(only: Sequence[str], share: str) -> None:
    """Child of ``compile_all``: run and check its part of the tiny points."""
    index, workers = (int(word) for word in share.split("/"))
    at = 0
    for family in only:
        for point in FAMILIES[family](device_facts(), True):
            if at % workers == index:
                _verify(point)
            at += 1


def _verify(point: Point) -> float:
    error = point.check()
    torch.cuda.synchronize()
    if not error <= point.limit:
        raise SystemExit(f"{point.name} {point.config}: error {error:.3g} is over {point.limit}")
    return error


def label(config: KernelConfig | None) -> str:
    if config is None:
        return ""
    meta = " ".join(f"{name}{value}" for name, value in config.meta)
    return f"{config.kernel} {meta} w{config.num_warps} s{config.num_stages}"


def measure(family: str, deadline: float) -> list[dict[str, Any]]:
    """All points of a family; prints each problem's best three and its default (the first)."""
    cells: list[dict[str, Any]] = []
    found: dict[str, list[tuple[float, Point]]] = {}
    for point in FAMILIES[family](device_facts(), False):
        if time.time() - START > deadline:
            say(f"{family}: out of time, stopped before {point.name}")
            break
        _verify(point)
        times = graph_us(point.launches)
        middle = statistics.median(times)
        found.setdefault(point.name, []).append((middle, point))
        cells.append({"name": f"{point.name} | {label(point.config)}", "value": middle, "unit": "us",
                      "floor": point.facts.get("floor"), "peer": None, "peer_name": None,
                      "spread": max(times) - min(times)})
    for name, results in found.items():
        default = results[0]
        results = sorted(results, key=lambda pair: pair[0])
        facts = results[0][1].facts
        extra = ""
        if "floor" in facts:
            extra = f" floor {facts['floor']:.1f} us = {facts['floor'] / results[0][0]:.0%}"
        if "flops" in facts:
            extra = f" {facts['flops'] / results[0][0] / 1e6:.0f} TFLOP/s"
        say(f"{name}: {results[0][0]:.2f} us{extra} | " + " | ".join(
            f"{us:.2f} {label(point.config)}" for us, point in results[:3]) + f" | default {default[0]:.2f}")
    return cells


def write(path: str, cells: list[dict[str, Any]]) -> None:
    """The document of ``evals.bench`` in plain json: nothing but torch and triton need be installed where this runs."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    Path(path).write_text(json.dumps({"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": "unknown",
                                      "device": torch.cuda.get_device_name(), "versions": versions,
                                      "command": " ".join(sys.argv), "cells": cells}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write all points here")
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--workers", type=int, default=0, help="processes that compile beforehand")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further point is timed")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.share:
        run_share(options.only, options.share)
        return
    if options.workers:
        compile_all(options.only, options.workers)
        say("compiled")
    cells: list[dict[str, Any]] = []
    for family in options.only:
        cells += measure(family, options.limit)
        if options.json and cells:
            write(options.json, cells)


if __name__ == "__main__":
    main()
