"""What the server costs: output tokens a second over HTTP, without and with streaming, beside the in-process loop.

For each concurrency c: c random prompts of ``--isl`` ids at once, ``--osl`` tokens each, end tokens ignored. In process
that is one ``LLM.generate`` of c prompts; over HTTP c requests at the same moment, from the first byte sent to the last
answer's end. Each side is warmed up once, then measured ``--repeats`` times with fresh prompts; a cell is the median,
``peer`` the in-process loop's. Demanded: 0.95 of it without streaming, 0.85 with.

    python -m benchmarks.serve_throughput --engine DIR --concurrency 1 8 64 256 --isl 128 --osl 128 --json serve.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np

from benchmarks.serve_soak import Server
from benchmarks.soak_load import MODEL
from engines.llm import LLM
from engines.request import SamplingParams
from evals.bench import BenchCell, cell_of, write_cells

FLOORS = {"whole": 0.95, "stream": 0.85}


class Prompts:
    """Fresh random ids, never the same twice: nothing is found in a prefix cache."""

    def __init__(self, vocab_size: int, isl: int) -> None:
        self._random, self._vocab_size, self._isl = np.random.default_rng(0), vocab_size, isl

    def take(self, count: int) -> list[list[int]]:
        return self._random.integers(0, self._vocab_size, (count, self._isl)).tolist()


def in_process(engine: Path, counts: list[int], isl: int, osl: int, repeats: int) -> dict[int, list[float]]:
    """Output tokens a second by concurrency."""
    rates: dict[int, list[float]] = {}
    with LLM(engine) as llm:
        prompts = Prompts(llm.tokenizer.vocab_size, isl)
        params = SamplingParams(max_tokens=osl, ignore_eos=True)
        for count in counts:
            llm.generate(prompts.take(count), params)
            rates[count] = []
            for _ in range(repeats):
                asked = prompts.take(count)
                start = time.perf_counter()
                llm.generate(asked, params)
                rates[count].append(count * osl / (time.perf_counter() - start))
    return rates


async def one(http: httpx.AsyncClient, prompt: list[int], osl: int, stream: bool) -> int:
    """Tokens of one request, which must be all that were asked for."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": osl, "temperature": 0, "ignore_eos": True}
    if not stream:
        answer = await http.post("/v1/completions", json=body)
        return answer.raise_for_status().json()["usage"]["completion_tokens"]
    last = ""
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body) as events:
        events.raise_for_status()
        async for line in events.aiter_lines():
            if line.startswith("data: {"):
                last = line
    return json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"]


async def over_http(url: str, vocab_size: int, counts: list[int], isl: int, osl: int, repeats: int
                    ) -> dict[tuple[int, str], list[float]]:
    """Output tokens a second by concurrency and way of answering."""
    prompts, rates = Prompts(vocab_size, isl), dict[tuple[int, str], list[float]]()
    limits = httpx.Limits(max_connections=max(counts), max_keepalive_connections=max(counts))
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        for count in counts:
            for way in FLOORS:
                found = rates[count, way] = []
                for repeat in range(repeats + 1):
                    asked = prompts.take(count)
                    start = time.perf_counter()
                    tokens = await asyncio.gather(*(one(http, prompt, osl, way == "stream") for prompt in asked))
                    seconds = time.perf_counter() - start
                    assert sum(tokens) == count * osl
                    found += [sum(tokens) / seconds] if repeat else []
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, required=True, help="an engine folder")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--isl", type=int, default=128)
    parser.add_argument("--osl", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = (options.concurrency, options.isl, options.osl, options.repeats)
    inside = in_process(options.engine, *shape)
    with tempfile.TemporaryDirectory() as home:
        server = Server(options.engine, Path(home))
        try:
            info = httpx.get(f"{server.url}/v1/metadata", timeout=30).json()
            outside = asyncio.run(over_http(server.url, info["vocab_size"], *shape))
        finally:
            server.stop()
    cells: list[BenchCell] = []
    for (count, way), rates in outside.items():
        peer = float(np.median(inside[count]))
        name = f"serve {way} concurrency={count} isl={options.isl} osl={options.osl}"
        cells.append(cell_of(name, rates, "tok/s", floor=FLOORS[way] * peer, peer=peer, peer_name="in-process loop"))
        print(f"{name:55} {cells[-1].value:10.1f} tok/s {cells[-1].value / peer:6.3f} of in-process {peer:10.1f}",
              flush=True)
    if options.json:
        write_cells(options.json, cells, f"python -m benchmarks.serve_throughput --engine DIR --concurrency "
                    f"{' '.join(map(str, options.concurrency))} --isl {options.isl} --osl {options.osl} "
                    f"--repeats {options.repeats}", device=info["device"])


if __name__ == "__main__":
    main()
