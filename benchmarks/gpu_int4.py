"""4-bit linears on one GPU: checks every candidate, times it with cold caches, prints TB/s, writes JSON.

    python benchmarks/gpu_int4.py [--tokens 1 8 16 32 64 128 256] [--prefill 16384] [--json FILE] [--seconds 150]

Per (Impl, tokens, layer shape of an 8B model): every candidate is compiled beforehand in parallel processes, compared
with the torch twin on a NaN-poisoned output, then timed as a CUDA graph over 32 distinct layers (the weights do not fit
into L2). The winners are timed again as one chain of 128 kernels, the order in which a decode step runs them. Bytes are
those of the stored weight, scales included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engines.kernels.impl import DeviceFacts, KernelConfig, LinearShape, Packed
from engines.kernels.linear.int4_a8 import Int4A8
from engines.kernels.linear.int4_a16 import Int4A16
from engines.kernels.linear.int4_layout import Geometry
from engines.kernels.linear.int4_linear import Int4Linear

LAYERS, GROUP = 32, 128
OPS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
IMPLS: dict[str, Int4Linear] = {"int4_a16": Int4A16(), "int4_a8": Int4A8()}
BEGUN = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - BEGUN:6.1f}]", *words, flush=True)


class _CompileOnly:
    """A driver for the compile processes: names the target, launches nothing."""

    target = GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        return None


def _compile(job: tuple[str, int, int, KernelConfig]) -> str:
    """Compile one candidate by a warm-up launch on small CPU tensors (only k and the group are in the code)."""
    name, m, k, config = job
    torch.set_num_threads(1)
    if not isinstance(getattr(driver, "_active", None), _CompileOnly):
        driver.set_active(_CompileOnly())
        run = JITFunction.run

        def warm(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
            if torch.cuda.device_count():
                from triton.backends.nvidia.driver import CudaLauncher
                CudaLauncher(kernel.src, kernel.metadata)
            return kernel

        JITFunction.run = warm
    impl = IMPLS[name]
    packed = make_weight(16, k, torch.Generator().manual_seed(0), "cpu")
    x, x_scale = make_tokens(name, m, k, "cpu")
    out = torch.empty(m, 16, dtype=torch.bfloat16)
    try:
        needed = impl.workspace_bytes(LinearShape(m, 16, k, GROUP), config)
        workspace = torch.zeros(needed + 1, dtype=torch.uint8)[:needed]
        impl.launch(x, packed, config, out, x_scale=x_scale, workspace=workspace)
    except Exception as error:  # a candidate that does not compile is a finding, not the end
        return f"{name} m={m} k={k} {config}: {type(error).__name__} {str(error)[:300]}"
    return ""


def precompile(jobs: list[tuple[str, int, int, KernelConfig]]) -> None:
    began = time.monotonic()
    answers: list[str] = []
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        arriving = pool.imap_unordered(_compile, jobs)
        try:
            while len(answers) < len(jobs):
                answers.append(arriving.next(timeout=45))
        except multiprocessing.TimeoutError:
            say("the compile pool hangs; the rest is compiled when first used")
    failures = [text for text in answers if text]
    say(f"compiled {len(answers)}/{len(jobs)} variants in {time.monotonic() - began:.1f} s, {len(failures)} failed")
    for text in failures[:10]:
        say("  FAILED", text)


def make_weight(n: int, k: int, generator: torch.Generator, device: str, dtype: torch.dtype = torch.float16) -> Packed:
    """Random words are random codes in either order; scales are drawn directly in storage order."""
    geometry = Geometry(n, k, GROUP)
    words = torch.randint(-2**31, 2**31, (geometry.tiles, geometry.chunks, 32, 4), generator=generator, device=device,
                          dtype=torch.int32)
    per_load = 2 if dtype == torch.float32 else 4
    scales = torch.rand(geometry.tiles, geometry.groups // per_load, 8, per_load, 2, generator=generator, device=device)
    return Packed({"words": words, "scales": (scales * 0.01 + 0.005).to(dtype)}, n, k, GROUP)


def make_tokens(name: str, m: int, k: int, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = torch.randn(m, k, device=device)
    if name == "int4_a16":
        return x.bfloat16(), None
    scale = x.view(m, k // GROUP, GROUP).abs().amax(2) / 127
    return (x / scale.repeat_interleave(GROUP, 1)).round().to(torch.int8), scale


def graph_us(launches: list[tuple[Callable[[int], None], int]], replays: int) -> tuple[float, float, float]:
    """Median, least and greatest time of the launches, captured in one graph, in us."""

    def work() -> None:
        for launch, layer in launches:
            launch(layer)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        graph.replay()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
        for begin, end in events:
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
    times = [1e3 * begin.elapsed_time(end) for begin, end in events]
    return statistics.median(times), min(times), max(times)


def weight_bytes(packed: Packed) -> int:
    return sum(t.nbytes for t in packed.tensors.values())


def label(config: KernelConfig) -> str:
    meta = ",".join(f"{k}{v}" for k, v in config.meta if not (k == "BLOCK_K" and config.kernel == "mma"))
    return f"{config.kernel}:{meta},w{config.num_warps},s{config.num_stages}{',pdl' if config.pdl else ''}"


class Bench:
    """Weights of 32 layers, and the loops over shapes and candidates."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.facts = _facts()
        generator = torch.Generator(device="cuda").manual_seed(0)
        self.weights = {op: [make_weight(n, k, generator, "cuda") for _ in range(LAYERS)] for op, (n, k) in OPS.items()}
        self.workspace = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
        self.rows: list[dict[str, Any]] = []

    def launcher(self, name: str, op: str, m: int, config: KernelConfig, layers: list[Packed]) -> Callable[[int], None]:
        impl, k = IMPLS[name], OPS[op][1]
        x, x_scale = make_tokens(name, m, k, "cuda")
        out = torch.full((m, OPS[op][0]), float("nan"), dtype=torch.bfloat16, device="cuda")
        impl.launch(x, layers[1], config, out, x_scale=x_scale, workspace=self.workspace)
        want = impl.twin(x, layers[1], x_scale=x_scale)
        error = float((out.float() - want).norm() / want.norm())
        if not error < 8e-3:
            raise ValueError(f"relative error {error:.2e}")

        def launch(layer: int) -> None:
            impl.launch(x, layers[layer], config, out, x_scale=x_scale, workspace=self.workspace)

        return launch

    def sweep(self, name: str, m: int, configs: dict[str, list[KernelConfig]]) -> None:
        """Time every candidate of every layer shape, then the winners as a chain."""
        best: dict[str, tuple[float, Callable[[int], None], KernelConfig]] = {}
        for op in OPS:
            layers = self.weights[op]
            timed = []
            for config in configs[op]:
                if time.monotonic() - BEGUN > self.seconds:
                    say("out of time in", name, m, op)
                    break
                try:
                    launch = self.launcher(name, op, m, config, layers)
                    us = graph_us([(launch, i) for i in range(LAYERS)], 8 if m <= 256 else 3)[0] / LAYERS
                except Exception as error:  # one bad candidate is reported, the others are still timed
                    say("  WRONG", name, m, op, label(config), type(error).__name__, str(error)[:200])
                    continue
                timed.append((us, launch, config))
                self.rows.append({"impl": name, "m": m, "op": op, "config": config.to_json(), "us": round(us, 3)})
            if not timed:
                return
            timed.sort(key=lambda row: row[0])
            best[op] = timed[0]
            tera = weight_bytes(layers[0]) / 1e6
            say(f"{name} M={m} {op}:", " | ".join(f"{label(c)} {us:.2f}us {tera / us:.2f}" for us, _, c in timed[:5]),
                f"| worst {timed[-1][0]:.1f}us")
        self.chain(name, m, best)

    def chain(self, name: str, m: int, best: dict[str, tuple[float, Callable[[int], None], KernelConfig]]) -> None:
        us, low, high = graph_us([(best[op][1], i) for i in range(LAYERS) for op in OPS], 40 if m <= 256 else 3)
        total = LAYERS * sum(weight_bytes(self.weights[op][0]) for op in OPS)
        say(f"CHAIN {name} M={m}: {us:.0f} us ({low:.0f}..{high:.0f}), {total / us / 1e6:.2f} TB/s,"
            f" {2e-6 * m * LAYERS * sum(n * k for n, k in OPS.values()) / us:.0f} TFLOP/s, {m / us * 1e6:.0f} tok/s")
        self.rows.append({"impl": name, "m": m, "op": "chain", "us": round(us, 1), "low": round(low, 1),
                          "high": round(high, 1), "tb_s": round(total / us / 1e6, 3),
                          "config": {op: row[2].to_json() for op, row in best.items()}})


def _facts() -> DeviceFacts:
    if not torch.cuda.is_available():
        return DeviceFacts("NVIDIA H200", 90, 132, 232448, 60 << 20)
    p = torch.cuda.get_device_properties(0)
    return DeviceFacts(p.name, 10 * p.major + p.minor, p.multi_processor_count, 0, p.L2_cache_size)


def extra(impl: str, m: int, facts: DeviceFacts, grid_tiles: int) -> list[KernelConfig]:
    """Wider search than the candidates, for a new device or a changed kernel (``--wide``)."""
    tiles = 1 if m <= 8 else 2 if m <= 16 else 4
    rows = [(w, u, rt, per_sm) for w in (2, 4, 8, 16) for u in (2, 4) for rt in (1, 2) for per_sm in (0, 1, 2)]
    found = []
    for warps, unit, rt, per_sm in rows:
        if m <= 32 and rt * tiles <= 4 and per_sm * facts.num_sms * rt < grid_tiles and per_sm * warps <= 32:
            for pdl in (True, False) if per_sm == 0 and rt == 1 and m == 1 else (True,):
                found += [KernelConfig.of("mma", num_warps=warps, pdl=pdl, UNIT=unit, RT=rt, NT=tiles, SPLIT_K=1,
                                          STAGED=staged, PROGRAMS=per_sm * facts.num_sms, BLOCK_K=unit * GROUP * warps)
                          for staged in ((1,) if m == 1 else (0, 8) if m <= 8 else (0,))]
    return found


def _code(config: KernelConfig) -> KernelConfig:
    """The config with what is not compiled into the code made equal."""
    meta = dict(config.meta)
    if meta.get("PROGRAMS"):
        meta["PROGRAMS"] = 1
    return KernelConfig.of(config.kernel, num_warps=config.num_warps, num_stages=config.num_stages, pdl=config.pdl,
                           **meta)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--impls", nargs="*", default=list(IMPLS))
    parser.add_argument("--prefill", type=int, default=16384)
    parser.add_argument("--wide", type=int, nargs="*", default=[], help="batch sizes to search beyond the candidates")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    facts = DeviceFacts("", 90, 132, 0, 0)
    plan: list[tuple[str, int, dict[str, list[KernelConfig]]]] = []
    for m in [*args.tokens, *([args.prefill] if args.prefill else [])]:
        for name in args.impls:
            configs = {}
            for op, (n, k) in OPS.items():
                found = list(IMPLS[name].candidates(LinearShape(m, n, k, GROUP), facts))
                if m in args.wide:
                    found += [c for c in extra(name, m, facts, n // 16) if c not in found]
                if m > 512:
                    found = [c for c in found if c.kernel == "mm"]
                configs[op] = found
            plan.append((name, m, configs))
    jobs = {(name, _code(c), OPS[op][1]): (name, min(m, 512), OPS[op][1], c)
            for name, m, configs in plan for op in OPS for c in configs[op]}
    precompile(list(jobs.values()))
    if args.compile_only:
        return
    say("torch", torch.__version__, "triton", triton.__version__, _facts())
    bench = Bench(args.seconds)
    for name, m, configs in plan:
        bench.sweep(name, m, configs)
    if args.json:
        args.json.write_text(json.dumps({"device": _facts().name, "torch": torch.__version__,
                                         "triton": triton.__version__, "group": GROUP, "rows": bench.rows}))


if __name__ == "__main__":
    main()
