"""Mixed load and faults against ``toolkit serve``, on loopback: does all end rightly, and nothing stay?

``--requests`` requests at ``--in-flight`` at a time, in ``--rounds`` rounds of the same seeded mix: greedy and seeded
answers (streamed and not, long and short, with shared beginnings and priorities), schemas, streams dropped midway,
requests cancelled, bad parameters, prompts over the limit, bodies that are no JSON, pathological schemas and
expressions; beside them one client that reads slowly and one that never reads. Checked in every round:

    answers    a greedy one equals the solo run's, unless the two best tokens were within ``TIE`` there; a seeded one
               is the same in every round; a schema's answer parses; what is wrong is a 4xx in words
    after it   no KV block is used, nothing runs or waits, the front end has no more tasks than before
    memory     of both processes: after the last round within 5 % + 24 MiB of after the first

    python -m benchmarks.serve_soak --engine DIR --requests 1000 --in-flight 64 --rounds 3 --json soak.json
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from benchmarks.soak_load import MODEL, Ask, Result, Round, make_mix
from engines.llm import LLM
from engines.request import SamplingParams
from evals.bench import BenchCell, write_cells


class Server:
    """``toolkit serve`` in a process of its own, in a home of its own."""

    def __init__(self, engine: Path, home: Path) -> None:
        self._log = (home / "serve.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "toolkit", "serve", str(engine), "--home", str(home), "--port", "0", "-q",
             "--model-id", MODEL, "--max-queue", "4096"], stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            self.process.wait(10)
            raise RuntimeError(f"the server did not start: {Path(self._log.name).read_text()[-2000:]}")

    def memory(self) -> int:
        """Resident bytes of front end and engine."""
        front = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in (front, *front.children()))

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


def solo(engine: Path, asks: list[Ask]) -> dict[int, tuple[str, float]]:
    """Each greedy ask answered alone, in process, without reuse: (text, smallest gap between the two best tokens)."""
    found: dict[int, tuple[str, float]] = {}
    with LLM(engine, prefix_cache=False) as llm:
        for ask in asks:
            if ask.kind in ("greedy", "stream", "drop"):
                [out] = llm.generate(ask.prompt, SamplingParams(max_tokens=ask.count, logprobs=2))
                gaps = [abs(first - second) for one in out.outputs[0].logprobs or []
                        for first, second in [list(one.top.values())[:2]]]
                found[ask.number] = (out.outputs[0].text, min(gaps))
    return found


def figures(url: str) -> dict[str, float]:
    """All samples of /metrics by name and labels."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return {name: float(value) for name, value in re.findall(r"^(\S+) (\S+)$", text, re.MULTILINE)}


def settled(url: str, tasks: float, patience_s: float = 30.0) -> str | None:
    """Wait until nothing is used, runs or waits; what does not settle, in words."""
    end = time.monotonic() + patience_s
    while True:
        now = figures(url)
        left = {name: now[name] for name in ('toolkit_kv_blocks{state="used"}', "toolkit_requests_running",
                                             "toolkit_requests_waiting") if now[name]}
        if now["toolkit_server_tasks"] > tasks:
            left["tasks"] = now["toolkit_server_tasks"] - tasks
        if not left:
            return None
        if time.monotonic() > end:
            return f"left behind: {left}"
        time.sleep(0.1)


def queue_p99(url: str) -> float:
    """Seconds by which 99 of 100 prompts had started: the histogram bucket's upper end."""
    now = figures(url)
    buckets = sorted((float(found[1]), value) for name, value in now.items()
                     if (found := re.fullmatch(r'toolkit_queue_seconds_bucket\{le="([^"]+)"\}', name)))
    return next((edge for edge, count in buckets if count >= 0.99 * buckets[-1][1]), float("inf"))


async def soak(server: Server, engine: Path, requests: int, in_flight: int, rounds: int, seed: int = 0) -> Result:
    """All rounds; the result's ``faults`` are empty when everything held."""
    info = httpx.get(f"{server.url}/v1/metadata", timeout=30).json()
    asks = make_mix(requests, info["limits"]["max_seq_len"] // 2, seed)
    answers = await asyncio.to_thread(solo, engine, asks)
    tasks = figures(server.url)["toolkit_server_tasks"]
    total, seeded = Result(), dict[int, str]()
    for number in range(rounds):
        its = Round(server.url, asks, answers, seeded, in_flight)
        try:
            found = await its.run()
        finally:
            await its.close()
        total.ends += found.ends
        total.faults += [f"round {number + 1}: {fault}" for fault in found.faults]
        total.ties, total.tokens, total.seconds = (total.ties + found.ties, total.tokens + found.tokens,
                                                   total.seconds + found.seconds)
        if (left := await asyncio.to_thread(settled, server.url, tasks)) is not None:
            total.faults.append(f"round {number + 1}: {left}")
        total.memory.append(server.memory())
    if total.memory[-1] > 1.05 * total.memory[0] + (24 << 20):
        total.faults.append(f"memory grew from {total.memory[0]:,} to {total.memory[-1]:,} bytes")
    total.queue_p99_s = queue_p99(server.url)
    return total


def cells_of(result: Result, requests: int, in_flight: int, rounds: int) -> list[BenchCell]:
    label = f"soak requests={requests} in_flight={in_flight} rounds={rounds}"
    figures_of = {"faults": (float(len(result.faults)), "requests"), "ties": (float(result.ties), "requests"),
                  "queue p99 at most": (result.queue_p99_s, "s"), "seconds": (result.seconds, "s"),
                  "memory growth after round 1": ((result.memory[-1] - result.memory[0]) / 2**20, "MiB")}
    return [BenchCell(name=f"{label} {name}", value=value, unit=unit) for name, (value, unit) in figures_of.items()] + [
        BenchCell(name=f"{label} ends: {name}", value=float(count), unit="requests")
        for name, count in sorted(result.ends.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, required=True, help="an engine folder")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        server = Server(options.engine, Path(home))
        try:
            result = asyncio.run(soak(server, options.engine, options.requests, options.in_flight, options.rounds,
                                      options.seed))
        finally:
            code = server.stop()
    if code:
        result.faults.append(f"the server ended with code {code}")
    cells = cells_of(result, options.requests, options.in_flight, options.rounds)
    print("\n".join(f"{cell.name:70} {cell.value:10.4g} {cell.unit}" for cell in cells))
    print("\n".join(result.faults[:40]) or "everything held")
    if options.json:
        write_cells(options.json, cells, f"python -m benchmarks.serve_soak --engine DIR --requests {options.requests} "
                    f"--in-flight {options.in_flight} --rounds {options.rounds} --seed {options.seed}")
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
