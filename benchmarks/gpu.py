"""The GPU benchmark: a random Llama-3.1-8B is built, opened and asked through ``LLM.generate``; wall clock throughout.

    python -m benchmarks.gpu --precision int8 --json out.json [--cells decode prefill long] [--tune quick] [--peer]

Cells, by DESIGN's formula: decode step = (T(128) - T(1)) / 127 at ISL 128, T the best of ``--repeats`` calls; prefill
tokens/s = batch * ISL / T(1), and the steps behind those prompts; ttft = T(1) at batch 1. ``long``: decode at 8k and
32k context, from each request's own first and last token time. Floors are bytes of weights (and KV) over the copy
bandwidth measured in this run; prefill has none. ``--peer`` runs vLLM's benchmark of the same cells from ``.peers`` in
the same call. ``--profile`` prints the time of each kernel in one decode step, ``--profile-prefill`` in prompts of 2048
tokens. One precision a run; runs are merged by device, versions and commit.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu_model import FP8_KV, SCHEMES, RandomCheckpoint
from benchmarks.gpu_peers import PEERS, read_peers, run_peers, with_peers
from benchmarks.gpu_profile import profile, profile_prefill, prompts, say
from calib.progress import Progress
from calib.scheme import BF16
from engines.build.builder import build
from engines.build.plan_gpu import stored_bytes
from engines.engine import Engine
from engines.llm import LLM
from engines.plan import EngineSpec, Plan
from engines.request import SamplingParams
from engines.runtime.cuda.memory import release
from evals.bench import BenchCell, table, write_cells

DECODE_BATCHES = (1, 8, 32, 128, 256)
PREFILLS = ((1, 128), (1, 2048), (8, 2048), (32, 2048))
LONG = ((1, 8192), (16, 8192), (1, 32768), (16, 32768))


class Reporter:
    """Prints the beginning of each stage."""

    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, event: Progress) -> None:
        if event.stage != self._stage or (event.total is not None and event.done == event.total):
            self._stage = event.stage
            say(f"{event.stage} {event.done:.0f}/{event.total} {event.message}")


def seconds(llm: LLM, batch: int, isl: int, osl: int, repeats: int) -> list[float]:
    """Wall-clock times of whole calls."""
    params = SamplingParams(max_tokens=osl, ignore_eos=True)
    ids = prompts(batch, isl)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        outputs = llm.generate(ids, params)
        times.append(time.perf_counter() - start)
        if any(len(output.outputs[0].token_ids) != osl for output in outputs):
            raise RuntimeError(f"a request gave fewer than {osl} tokens")
    return times


def copy_bandwidth() -> float:
    """Bytes a second of a 4 GiB copy, read and written."""
    source = torch.ones(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = 1e9
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best


class Cells:
    """Collects the cells of one engine."""

    def __init__(self, llm: LLM, precision: str, bandwidth: float) -> None:
        plan = llm.engine.plan
        self.llm, self.bandwidth, self.plan = llm, bandwidth, plan
        self.label = f"{precision} kv={'fp8' if plan.kv.quantized else 'bf16'}"
        if plan.deterministic:
            self.label += " deterministic"
        self.cells: list[BenchCell] = []
        embedding = 2 * plan.model.vocab_size * plan.model.hidden_size
        self.weights = stored_bytes(plan.program) - (0 if plan.model.tied_embeddings else embedding)
        self.kv_token = kv_bytes(plan)

    def add(self, name: str, value: float, unit: str, floor: float | None = None, spread: float | None = None) -> None:
        self.cells.append(BenchCell(name=name, value=value, unit=unit, floor=floor, spread=spread))
        share = "" if floor is None else f"  floor {floor:.4g} ({100 * floor / value:.0f} %)"
        say(f"{name}: {value:.4g} {unit}{share}")

    def decode(self, batches: tuple[int, ...], repeats: int) -> None:
        for batch in batches:
            self._steps(batch, 128, seconds(self.llm, batch, 128, 1, repeats), repeats)

    def _steps(self, batch: int, isl: int, first: list[float], repeats: int) -> None:
        """The steps behind prompts that take ``first`` seconds."""
        whole = seconds(self.llm, batch, isl, 128, repeats)
        floor = (self.weights + batch * (isl + 64) * self.kv_token) / self.bandwidth * 1e3
        self.add(f"decode {self.label} batch={batch} isl={isl}", (min(whole) - min(first)) / 127 * 1e3, "ms", floor,
                 (max(whole) - min(whole)) / 127 * 1e3)

    def prefill(self, shapes: tuple[tuple[int, int], ...], repeats: int) -> None:
        """Prompts, and after each the steps behind them: vLLM's order. Many prompts in a row take 2 % longer, as the
        card's power is at its limit, so both sides must have done the same before."""
        for batch, isl in shapes:
            times = seconds(self.llm, batch, isl, 1, repeats)
            if batch == 1:
                self.add(f"ttft {self.label} batch=1 isl={isl}", min(times) * 1e3, "ms", None,
                         (max(times) - min(times)) * 1e3)
            self.add(f"prefill {self.label} batch={batch} isl={isl}", batch * isl / min(times), "tok/s")
            if isl > 128:  # steps behind shorter ones are ``decode``'s
                self._steps(batch, isl, times, repeats)

    def long(self, shapes: tuple[tuple[int, int], ...]) -> None:
        """The last sequence's own steps: when its first token comes, all are decoding, and are still when it ends."""
        for batch, isl in shapes:
            if isl + 128 > self.plan.limits.max_seq_len:
                continue
            counts = [48 + 4 * batch] * (batch - 1) + [48]
            outputs = self.llm.generate(prompts(batch, isl), [SamplingParams(max_tokens=count, ignore_eos=True)
                                                              for count in counts])
            last = outputs[-1]
            if any((output.ttft_s or 0.0) > (last.ttft_s or 0.0) or (output.e2e_s or 0.0) < (last.e2e_s or 0.0)
                   for output in outputs):
                raise RuntimeError("the last prompt was not decoded beside all the others")
            assert last.e2e_s is not None
            assert last.ttft_s is not None
            step = (last.e2e_s - last.ttft_s) / 47 * 1e3
            floor = (self.weights + batch * (isl + 24) * self.kv_token) / self.bandwidth * 1e3
            self.add(f"decode {self.label} batch={batch} isl={isl}", step, "ms", floor)


def kv_bytes(plan: Plan) -> int:
    model = plan.model
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * (1 if plan.kv.quantized else 2)


def evidence(engine: Engine) -> None:
    """What tuning measured, at a few step sizes."""
    for timing in engine.timings()["tuning"]:
        if "layers" in timing:
            say(f"step of {timing['layers']} layers, {timing['tokens']} tokens: {timing['before']} -> "
                f"{timing['after']} us")
            for change in timing["changes"]:
                say("   ", change)
        elif timing["tokens"] in (1, 16, 64, 256, 4096) and timing["microseconds"]:
            say(f"{timing['shape']} tokens={timing['tokens']}: {timing['microseconds']} us, floor "
                f"{timing['floor_fraction']} {timing['config']} | {timing['runner_up_microseconds']} "
                f"{timing['runner_up']}")


def save(cells: list[BenchCell], path: Path | None) -> None:
    """Write what there is, so that a run that is cut off leaves its figures."""
    if path is not None:
        write_cells(path, cells, device=torch.cuda.get_device_name())


def run(arguments: argparse.Namespace, work: Path) -> list[BenchCell]:
    checkpoint = RandomCheckpoint(arguments.precision, FP8_KV if arguments.kv == "fp8" else BF16, arguments.layers)
    spec = EngineSpec(device="cuda", max_seq_len=arguments.max_seq_len, max_batch_size=arguments.max_batch_size,
                      max_num_tokens=arguments.max_num_tokens, tune=arguments.tune,
                      deterministic=arguments.deterministic)
    bandwidth = copy_bandwidth()
    release()
    say(f"copy bandwidth {bandwidth / 1e12:.3f} TB/s")
    start = time.perf_counter()
    build(checkpoint, spec, work / "engine", Reporter(), tuning=work / "tuning")
    built = time.perf_counter() - start
    engine = Engine.open(work / "engine")
    evidence(engine)
    start = time.perf_counter()
    llm = LLM(engine, prefix_cache=False)
    loaded = time.perf_counter() - start
    if llm._gpu is not None:
        say("load", {name: round(its, 2) for name, its in llm._gpu.seconds.items()})
    cells = Cells(llm, arguments.precision, bandwidth)
    cells.add(f"build {cells.label} tune={arguments.tune}", built, "s")
    cells.add(f"load {cells.label}", loaded, "s")
    cells.add(f"memory {cells.label} without kv", ((llm.peak_memory_bytes or 0) - llm.stats()["blocks"] * kv_bytes(
        llm.engine.plan) * spec.block_size) / 2**30, "GiB")
    for fusion in llm.engine.plan.fusions:
        say(f"{fusion.rewrite}: {fusion.ops_before} -> {fusion.ops_after} ops")
    seconds(llm, 4, 64, 4, 1)
    if "decode" in arguments.cells:
        cells.decode(tuple(b for b in arguments.batches if b <= spec.max_batch_size), arguments.repeats)
        save(cells.cells, arguments.json)
    if "prefill" in arguments.cells:
        cells.prefill(tuple(s for s in PREFILLS if s[0] <= spec.max_batch_size), arguments.repeats)
        save(cells.cells, arguments.json)
    if "long" in arguments.cells:
        cells.long(LONG)
        save(cells.cells, arguments.json)
    if arguments.profile:
        for batch in arguments.profile:
            profile(llm, batch, 128)
    for batch in arguments.profile_prefill:
        profile_prefill(llm, batch)
    say("stats", llm.stats())
    llm.close()
    return cells.cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=SCHEMES, required=True)
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--cells", nargs="*", choices=("decode", "prefill", "long"), default=["decode", "prefill"])
    parser.add_argument("--tune", choices=("none", "quick", "full"), default="quick")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--max-seq-len", type=int, default=4096)
    parser.add_argument("--max-batch-size", type=int, default=256)
    parser.add_argument("--max-num-tokens", type=int, default=16384)
    parser.add_argument("--batches", type=int, nargs="*", default=list(DECODE_BATCHES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", type=int, nargs="*", default=[], metavar="BATCH")
    parser.add_argument("--profile-prefill", type=int, nargs="*", default=[], metavar="BATCH")
    parser.add_argument("--trials", action="store_true", help="print what every candidate took in a whole step")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--out", type=Path, help="keep the engine in this folder's engine/")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.trials:
        logging.basicConfig(format="[%(relativeCreated)7.0f ms] %(message)s")
        logging.getLogger("engines.build.tune_step").setLevel(logging.DEBUG)
    work = Path(tempfile.mkdtemp(prefix="toolkit-gpu-")) if arguments.out is None else arguments.out
    try:
        cells = run(arguments, work)
        if arguments.peer:
            release()
            run_peers(PEERS[arguments.precision], work)
            cells = with_peers(cells, read_peers(work))
        print(table(cells))
        save(cells, arguments.json)
    finally:
        if arguments.out is None:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
