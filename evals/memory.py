"""How much memory an engine takes, measured in a fresh process: ``python -m evals.memory ENGINE --batch 8 --isl 128``.

A process that has calibrated, or run another engine, keeps what it once touched, so its peak says nothing about this
engine. On a CPU the figure is the peak of *anonymous* resident memory (RssAnon: heap, not mapped files, which the
kernel can drop and share) while the engine is opened and generates, minus what the imports had taken. A thread samples
it every 2 ms, because the kernel keeps a high-water mark of all resident memory only. On CUDA it is what the allocator
and graphs reserved (the engine's own ``peak_memory_bytes``). Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from engines.engine import Engine
from engines.llm import LLM
from engines.request import SamplingParams
from engines.runtime.memory import MemoryWatch
from evals.errors import MeasureError
from evals.workload import Prompts


def peak_during(work: Callable[[], None], interval_s: float = 0.002) -> int | None:
    """Bytes by which anonymous memory peaked above its level before ``work``; None where the system does not tell."""
    watch, done = MemoryWatch(), threading.Event()

    def look_often() -> None:
        while not done.wait(interval_s):
            watch.look()
    watcher = threading.Thread(target=look_often, daemon=True)
    watcher.start()
    try:
        work()
    finally:
        watch.look()
        done.set()
        watcher.join()
    return watch.peak


def peak_of_engine(engine: Path, batch: int, isl: int, osl: int, seed: int) -> int | None:
    """Open the engine here, generate once, and say what it took; see the module's definition."""
    on_device: list[int | None] = []

    def work() -> None:
        with LLM(engine) as llm:
            prompts = Prompts(llm.tokenizer, seed).batch(batch, isl, "memory")
            llm.generate(prompts, SamplingParams(max_tokens=osl, min_tokens=osl, ignore_eos=True))
            if llm.engine.plan.device.kind != "cpu":
                on_device.append(llm.peak_memory_bytes)
    peak = peak_during(work)
    return on_device[0] if on_device else peak


def measure_peak(engine: Path, batch: int, isl: int, osl: int, *, seed: int = 0, timeout_s: float = 1800.0
                 ) -> int | None:
    """Run this module in a fresh process. MeasureError with its last line when it fails.

    What is no engine, or none for this device, is refused here (ArtifactError, EngineError) before a process starts.
    """
    Engine.open(engine)
    command = [sys.executable, "-m", "evals.memory", str(engine.absolute()), "--batch", str(batch), "--isl", str(isl),
               "--osl", str(osl), "--seed", str(seed)]
    root = str(Path(__file__).resolve().parent.parent)
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise MeasureError(f"measuring the memory of {engine} took longer than {timeout_s:g} s",
                           "Measure with a shorter prompt or a smaller batch.") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MeasureError(f"measuring the memory of {engine} failed (exit {done.returncode}): {last}",
                           "Run `python -m evals.memory ENGINE` to see all of it.")
    return json.loads(done.stdout.splitlines()[-1])["peak_memory_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--isl", type=int, default=128)
    parser.add_argument("--osl", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    peak = peak_of_engine(arguments.engine, arguments.batch, arguments.isl, arguments.osl, arguments.seed)
    print(json.dumps({"engine": str(arguments.engine), "batch": arguments.batch, "isl": arguments.isl,
                      "osl": arguments.osl, "peak_memory_bytes": peak}))


if __name__ == "__main__":
    main()
