"""Times every candidate of every linear on this GPU, cold caches, and checks each against its fp64 twin first.

    python -m benchmarks.gpu_linear --json out.json [--points all.json] [--impl fp8 ...] [--tokens 1 16 ...]
                                    [--variants] [--limit 240]

Shapes are Llama-3.1-8B's fused linears and its lm_head. A point is a CUDA graph of launches over distinct layers (at
least 400 MB of weights, so that nothing is found in L2) replayed; the value is the median replay over the launches.
Every configuration runs on a NaN-poisoned output and must agree with the twin before it is timed. Kernels are compiled
beforehand by one process a core. ``--variants`` adds TMA, prefetch and PDL variations of the leading tiles.

Printed: the best three a (linear, shape, tokens), and torch's own operator beside them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu_ops import START, graph_us, say, write
from engines.kernels.impl import DeviceFacts, KernelConfig, LinearShape, Packed
from engines.kernels.linear.bf16 import Bf16Linear
from engines.kernels.linear.fp8 import Fp8Linear
from engines.kernels.linear.int8 import Int8Linear
from engines.kernels.linear.natural import NaturalLinear
from engines.kernels.linear.weight_only import Int8WeightOnlyLinear
from engines.kernels.offline import compile_only

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
          "lm_head": (128256, 4096)}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 16384)
IMPLS: dict[str, NaturalLinear] = {impl.name: impl for impl in
                                   (Bf16Linear(), Fp8Linear(), Int8Linear(), Int8WeightOnlyLinear())}
COLD_BYTES = 400e6
READ_TB_S = 4.65  # a read-only kernel over 4 GiB on one H200
LAUNCHES = 24  # in a graph at least, so that its own start (about 5 us) is no part of the figure
RMS_LIMIT = 6e-3  # bf16 rounding is 1.7e-3, the fp8 accumulator adds up to 3e-3 at k = 14336


def device_facts() -> DeviceFacts:
    p = torch.cuda.get_device_properties(0)
    shared = triton.runtime.driver.active.utils.get_device_properties(0)["max_shared_mem"]
    return DeviceFacts(p.name, p.major * 10 + p.minor, p.multi_processor_count, shared, p.L2_cache_size)


@dataclass(slots=True)
class Layers:
    """Distinct weights of one shape, packed."""

    impl: NaturalLinear
    n: int
    k: int
    packed: list[Packed]

    @classmethod
    def make(cls, impl: NaturalLinear, n: int, k: int, count: int) -> Layers:
        return cls(impl, n, k, [impl.pack(*_weight(impl, n, k)) for _ in range(count)])


def _weight(impl: NaturalLinear, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    dtype = impl.weight_dtypes[0]
    if dtype == torch.int8:
        return torch.randint(-127, 128, (n, k), dtype=dtype, device="cuda"), torch.rand(n, device="cuda") * 1e-4 + 1e-4
    values = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    if dtype == torch.bfloat16:
        return values.mul_(0.02), None
    return values.mul_(100).clamp_(-448, 448).to(dtype), torch.rand(n, device="cuda") * 1e-4 + 1e-4


def inputs(impl: NaturalLinear, m: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Random activations as the impl takes them, and their token scales."""
    x = torch.randn(m, k, device="cuda")
    if not impl.quantized_x:
        return x.to(torch.bfloat16), None
    limit = 127.0 if impl.x_dtypes[0] == torch.int8 else 448.0
    scale = x.abs().amax(1) / limit
    codes = x / scale[:, None]
    return (codes.round() if limit == 127.0 else codes).to(impl.x_dtypes[0]), scale


def configs(impl: NaturalLinear, shape: LinearShape, device: DeviceFacts, variants: bool) -> list[KernelConfig]:
    """The impl's candidates, and with ``variants`` other ways to feed the first dot tiles."""
    found = list(impl.candidates(shape, device))
    if variants and shape.m in (1, 16, 64) and impl.quantized_x:
        for config in [c for c in found if c.kernel == "dot"][:4]:
            meta = dict(config.meta)
            ahead = 2 * meta["BLOCK_K"] * impl.weight_dtypes[0].itemsize
            for change in ({"TMA": 0}, {"TMA": 2}, {"PREFETCH": ahead}):
                found.append(replace(config, meta=tuple(sorted({**meta, **change}.items()))))
    return list(dict.fromkeys(found))


def launch(layers: Layers, layer: int, config: KernelConfig, x: torch.Tensor, x_scale: torch.Tensor | None,
           out: torch.Tensor, workspace: torch.Tensor | None) -> None:
    layers.impl.launch(x, layers.packed[layer], config, out, x_scale=x_scale, workspace=workspace)


def compile_one(job: tuple[str, int, KernelConfig, int]) -> None:
    """Compile a configuration into Triton's disk cache; CPU tensors stand for the real ones."""
    name, m, config, capability = job
    impl = IMPLS[name]
    n, k = 1024, 4096
    weight = torch.zeros(n, k, dtype=torch.int8).to(impl.weight_dtypes[0])
    packed = impl.pack(weight, torch.ones(n) if impl.scaled else None)
    x = torch.zeros(m, k, dtype=torch.int8).to(impl.x_dtypes[0])
    workspace = torch.zeros(max(4, impl.workspace_bytes(LinearShape(m, n, k), config)), dtype=torch.uint8)
    with compile_only(capability, launchers=True):
        impl.launch(x, packed, config, torch.empty(m, n, dtype=torch.bfloat16),
                    x_scale=torch.ones(m) if impl.quantized_x else None, workspace=workspace)


def compile_all(jobs: list[tuple[str, int, KernelConfig, int]], seconds: float) -> set[tuple[str, KernelConfig]]:
    """Compile in one process a core for at most ``seconds``; returns what failed or was not reached."""
    begun = time.time()
    workers = os.cpu_count() or 1
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"))
    futures = {pool.submit(compile_one, job): job for job in jobs}
    done, late = wait(futures, timeout=seconds)
    errors = {future: future.exception() for future in done if future.exception() is not None}
    for process in list(pool._processes.values()) if late else []:
        process.kill()
    pool.shutdown(wait=not late, cancel_futures=True)
    say(f"compiled {len(done) - len(errors)} of {len(jobs)} variants in {time.time() - begun:.1f} s,",
        f"{workers} processes; {len(errors)} failed, {len(late)} not reached")
    for future, error in list(errors.items())[:8]:
        say("  failed:", futures[future][0], label(futures[future][2]), repr(error)[:200])
    return {(futures[future][0], futures[future][2]) for future in [*errors, *late]}


def label(config: KernelConfig) -> str:
    meta = ",".join(f"{k.lower().replace('block_', 'b')}{v}" for k, v in config.meta if k not in ("ROWS", "PROGRAMS"))
    return f"{config.kernel}:{meta},w{config.num_warps},s{config.num_stages}{',pdl' if config.pdl else ''}"


def measure(layers: Layers, m: int, todo: Iterable[KernelConfig], op: str, deadline: float) -> list[dict[str, Any]]:
    """Check and time configurations; a wrong one is reported and kept out of the ranking."""
    impl, n, k = layers.impl, layers.n, layers.k
    x, x_scale = inputs(impl, m, k)
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    want = impl.twin(x, layers.packed[-1], x_scale=x_scale)
    size = sum(t.nbytes for t in layers.packed[0].tensors.values())
    points = []
    for config in todo:
        if time.time() > deadline:
            say("  out of time at", op, m)
            break
        needed = impl.workspace_bytes(LinearShape(m, n, k), config)
        workspace = torch.zeros(needed, dtype=torch.uint8, device="cuda") if needed else None
        out.fill_(float("nan"))
        try:
            launch(layers, len(layers.packed) - 1, config, x, x_scale, out, workspace)
            error = ((out.float() - want).norm() / want.norm()).item()
            if not error < RMS_LIMIT:
                say(f"  WRONG {impl.name} {op} m={m} {label(config)} error {error:.1e}")
                continue

            launches = len(layers.packed) * (1 if m >= 2048 else -(-LAUNCHES // len(layers.packed)))

            steps = [partial(launch, layers, i % len(layers.packed), config, x, x_scale, out, workspace)
                     for i in range(launches)]
            times = graph_us(steps, 5 if m >= 2048 else 9)
            us = statistics.median(times)
        except Exception as problem:
            say(f"  FAILED {impl.name} {op} m={m} {label(config)} {type(problem).__name__} {str(problem)[:150]}")
            continue
        points.append({"impl": impl.name, "op": op, "m": m, "config": config.to_json(), "label": label(config),
                       "us": round(us, 3), "spread": round(max(times) - min(times), 3),
                       "tb_s": round(size / us / 1e6, 3), "tflop_s": round(2e-6 * m * n * k / us, 1),
                       "rms_error": float(f"{error:.2g}")})
    return sorted(points, key=lambda p: p["us"])


def library_us(layers: Layers, m: int) -> tuple[float, str]:
    """torch's bare operator, epilogue left out where it has none: a bound for what the library offers."""
    impl, k = layers.impl, layers.k
    x, _ = inputs(impl, m, k)
    weights = [p.tensors["weight"].t() for p in layers.packed]
    if impl.name == "fp8":
        one = torch.ones((), device="cuda")
        calls = [lambda w=w: torch._scaled_mm(x, w, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
                 for w in weights]
        name = "_scaled_mm per tensor"
    elif impl.name == "int8" and m > 16:
        calls, name = [lambda w=w: torch._int_mm(x, w) for w in weights], "_int_mm bare"
    else:
        return float("nan"), ""
    calls[0]()

    return statistics.median(graph_us(calls * (1 if m >= 2048 else -(-LAUNCHES // len(calls))), 5)), name


def sweep(impl: NaturalLinear, tokens: list[int], choose: Callable[[NaturalLinear, LinearShape], list[KernelConfig]],
          failed: set[tuple[str, KernelConfig]], deadline: float) -> list[dict[str, Any]]:
    """All shapes of one impl; prints a line a (shape, tokens)."""
    points: list[dict[str, Any]] = []
    for op, (n, k) in SHAPES.items():
        count = max(2, min(24, -(-int(COLD_BYTES) // (n * k * impl.weight_dtypes[0].itemsize))))
        layers = None
        for m in tokens:
            todo = [config for config in choose(impl, LinearShape(m, n, k)) if (impl.name, config) not in failed]
            if not todo or (op == "lm_head" and m > 256) or time.time() > deadline:
                continue
            layers = layers or Layers.make(impl, n, k, count)
            if m >= 2048:
                layers.packed = layers.packed[:2]
            found = measure(layers, m, todo, op, deadline)
            bare, name = library_us(layers, m)
            if name:
                found.append({"impl": impl.name, "op": op, "m": m, "config": None, "label": name, "us": round(bare, 3)})
            points += found
            best = " | ".join(f"{p['label']} {p['us']:.2f} us {p['tb_s']:.2f} TB/s {p['tflop_s']:.0f} TF" for p in
                              [p for p in found if p["config"]][:3])
            say(f"{impl.name} {op} m={m} [{len(found)}] {best} || {name} {bare:.2f}")
        del layers
        torch.cuda.empty_cache()
    return points


def summary(points: list[dict[str, Any]], tokens: list[int]) -> None:
    """Sums of the four layer linears over 32 layers, best configuration of each body."""
    for name in dict.fromkeys(p["impl"] for p in points):
        for m in tokens:
            words = []
            for kind in ("gemv", "dot", "mm", "torch", "bare", "best"):
                best: dict[str, float] = {}
                for p in points:
                    body = p["label"].split(":")[0]
                    bare = p["config"] is None
                    hit = bare if kind == "bare" else not bare and kind in (body, "best")
                    if p["impl"] == name and p["m"] == m and p["op"] != "lm_head" and hit:
                        best[p["op"]] = min(best.get(p["op"], 1e9), p["us"])
                if len(best) == 4:
                    words.append(f"{kind} {32 * sum(best.values()):.0f}")
            say(f"{name} m={m} 32 layers, us:", ", ".join(words))


def cells(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best a (linear, shape, tokens). Floor, up to 64 tokens: the weights read at 4.65 TB/s; peer: torch."""
    found = []
    for key in dict.fromkeys((p["impl"], p["op"], p["m"]) for p in points):
        here = [p for p in points if (p["impl"], p["op"], p["m"]) == key]
        ours = min((p for p in here if p["config"]), key=lambda p: p["us"], default=None)
        peer = min((p for p in here if p["label"].startswith(("torch", "_"))), key=lambda p: p["us"], default=None)
        if ours is not None:
            found.append({"name": "linear {} {} m={}".format(*key), "value": ours["us"], "unit": "us",
                          "floor": round(ours["us"] * ours["tb_s"] / READ_TB_S, 3) if key[2] <= 64 else None,
                          "peer": peer and peer["us"], "peer_name": peer and peer["label"].split(":")[0],
                          "spread": ours["spread"]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="the best of each, as evals.bench writes cells")
    parser.add_argument("--points", type=Path, help="every point, as plain JSON")
    parser.add_argument("--impl", nargs="+", choices=list(IMPLS), default=list(IMPLS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--compile-limit", type=float, default=300, help="seconds for compiling")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which nothing new is timed")
    args = parser.parse_args()
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=fork) as pool:  # this process opens CUDA only after the compilers are forked
        device = pool.submit(device_facts).result()

    def choose(impl: NaturalLinear, shape: LinearShape) -> list[KernelConfig]:
        return configs(impl, shape, device, args.variants)

    jobs = {(name, config): m for name in args.impl for m in args.tokens for n, k in SHAPES.values()
            for config in choose(IMPLS[name], LinearShape(m, n, k)) if config.kernel != "torch"}
    failed = compile_all([(name, min(m, 256), config, device.capability) for (name, config), m in jobs.items()],
                         args.compile_limit)
    points: list[dict[str, Any]] = []
    for name in args.impl:
        points += sweep(IMPLS[name], args.tokens, choose, failed, START + args.limit)
        write(str(args.json), cells(points))
        if args.points:
            args.points.write_text(json.dumps(points))
    summary(points, args.tokens)


if __name__ == "__main__":
    main()
