"""One call to a card: several steps in turn, each in its own process and with its own limit of time.

    python -m benchmarks.gpu_session OUT STEP... [--seconds N]

Steps:

    tests              kernels' case lists and the engine's tests, on the card
    PRECISION[:WORD]*  ``benchmarks.gpu``; words: kv (fp8 cache), long (contexts of 8k and 32k), full (``--tune full``),
                       det (deterministic), profile (kernel times at one sequence), trials (what tuning tried)
    peer:STAGE         vLLM's stage (``gpu_peers.PEERS``)
    serve:PRECISION    ``benchmarks.serve_throughput`` on the engine that PRECISION left behind

Leaves in OUT: a JSON document a step (what there is when it is cut off), ``peers.jsonl``, and ``log``, everything that
was printed. A step that fails or runs out of its time does not stop those behind it; the exit status is 1 then.
``gpu_page --take`` puts the documents into docs/benchmarks/gpu.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from benchmarks.gpu_model import SCHEMES
from benchmarks.gpu_page import TITLES
from benchmarks.gpu_peers import PEERS, SCRIPT

#: Seconds a step may take, by its kind; a full tuning of four bits takes the most.
LIMITS = {"tests": 240, "bench": 200, "full": 280, "peer": 200, "serve": 150}
TESTS = ("tests/kernels", "tests/engines/test_gpu_engine.py", "tests/engines/test_families_gpu.py",
         "tests/engines/test_races.py")
#: Compiling for cards that are not there is a CPU's work.
OFFLINE = ("tests/kernels/test_ops_offline.py", "tests/kernels/test_offline_linear.py",
           "tests/kernels/test_int4_compile.py")
WORDS = {"kv": ["--kv", "fp8"], "full": ["--tune", "full"], "det": ["--deterministic"], "profile": ["--profile", "1"],
         "trials": ["--trials"]}
LONG_CONTEXT = 33024


@dataclass(frozen=True, slots=True)
class Step:
    """A command, the seconds it may take, and a folder that must not be there before."""

    name: str
    command: list[str]
    seconds: int
    environment: dict[str, str] = field(default_factory=dict)
    fresh: Path | None = None


def bench(word: str, out: Path, engines: Path) -> Step:
    precision, *options = word.split(":")
    if precision not in SCHEMES or any(option not in {*WORDS, "long"} for option in options):
        raise SystemExit(f"{word!r} is no step: PRECISION is one of {', '.join(SCHEMES)}, and its words are "
                         f"{', '.join([*WORDS, 'long'])}")
    suffix = {"kv": "-kv_fp8", "full": "-full", "det": "-deterministic"}
    name = precision + "".join(suffix.get(option, "") for option in options)
    cells = ["decode", *([] if {"kv", "det"} & {*options} else ["prefill"]),
             *(["long"] if "long" in options or "kv" in options else [])]
    if name not in TITLES:
        raise SystemExit(f"{word!r}: no table shows {name!r}; its names are {', '.join(TITLES)}")
    command = [sys.executable, "-m", "benchmarks.gpu", "--precision", precision, "--repeats", "2", "--json",
               str(out / f"{name}.json"), "--out", str(engines / name), "--cells", *cells]
    if "long" in cells:
        command += ["--max-seq-len", str(LONG_CONTEXT)]
    for option in options:
        command += WORDS.get(option, [])
    return Step(name, command, LIMITS["full" if "full" in options else "bench"], fresh=engines / name)


def step_of(word: str, out: Path, engines: Path) -> Step:
    """What a word asks for. SystemExit for a word that asks for nothing."""
    kind, _, rest = word.partition(":")
    if word == "tests":
        # the card waits for compilers most of the time: as many processes as there may be
        many = ["-v", "-n", "14", "--dist", "worksteal"] if find_spec("xdist") else []
        ignored = [f"--ignore={path}" for path in OFFLINE]
        return Step(word, [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *many, *ignored, *TESTS],
                    LIMITS["tests"])
    if kind == "peer":
        known = {stage for stages in PEERS.values() for stage in stages}
        if rest not in known:
            raise SystemExit(f"{word!r}: vLLM's stages are {', '.join(sorted(known))}")
        return Step(word, ["bash", str(SCRIPT), str(out), rest], LIMITS["peer"], {"LIM": str(LIMITS["peer"] - 5)})
    if kind == "serve":
        return Step(kind, [sys.executable, "-m", "benchmarks.serve_throughput", "--engine",
                           str(engines / rest / "engine"), "--concurrency", "1", "8", "64", "256", "--isl", "128",
                           "--osl", "128", "--repeats", "5", "--json", str(out / "serve.json")], LIMITS["serve"])
    return bench(word, out, engines)


def run(step: Step, seconds: float, log: Path) -> bool:
    """Run a step, printing and keeping what it prints. When it ends or its time is up, nothing of its process group is
    left: the card's memory is the next step's."""
    start, limit = time.monotonic(), min(seconds, step.seconds)
    print(f"== {step.name}, at most {limit:.0f} s", flush=True)
    if step.fresh is not None:
        shutil.rmtree(step.fresh, ignore_errors=True)
    with log.open("ab", buffering=0) as file:
        file.write(f"== {' '.join(step.command)}\n".encode())
        process = subprocess.Popen(step.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   start_new_session=True, env={**os.environ, **step.environment})
        copying = threading.Thread(target=_copy, args=(process, file), daemon=True)
        copying.start()
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        copying.join(5)  # a process that left the group may hold the pipe for ever
    print(f"== {step.name}: exit {code} after {time.monotonic() - start:.0f} s", flush=True)
    return code == 0


def _copy(process: subprocess.Popen[bytes], file: IO[bytes]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError, OSError):
        for line in process.stdout:
            file.write(line)
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", nargs="+", metavar="STEP")
    parser.add_argument("--seconds", type=float, default=590.0, help="of the whole call")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    engines = Path(".out/engines")
    arguments.out.mkdir(parents=True, exist_ok=True)
    steps = [step_of(word, arguments.out, engines) for word in arguments.steps]
    names = [step.name for step in steps]
    if len({*names}) < len(names):
        raise SystemExit(f"two steps write one document: {', '.join(sorted(n for n in names if names.count(n) > 1))}")
    failed = []
    for step in steps:
        left = end - time.monotonic()
        if left < 20:
            print(f"== {step.name}: no time left", flush=True)
            failed.append(step.name)
        elif not run(step, left, arguments.out / "log"):
            failed.append(step.name)
    if failed:
        raise SystemExit(f"not done: {', '.join(failed)}")


if __name__ == "__main__":
    main()
