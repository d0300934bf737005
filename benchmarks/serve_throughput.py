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
from urllib.parse import urlsplit

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
            print(f"in process, {count}: {np.median(rates[count]):.0f} tok/s", flush=True)
    return rates


class Connection:
    """A kept-alive connection that reads as fast as bytes come: a load client must not be what is measured."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host

    @classmethod
    async def to(cls, url: str) -> Connection:
        host = urlsplit(url)
        return cls(*await asyncio.open_connection(host.hostname, host.port, limit=1 << 20), host.netloc)

    def asked(self, prompt: list[int], osl: int, stream: bool) -> bytes:
        """The bytes of one request."""
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": osl, "temperature": 0, "ignore_eos": True}
        if stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(asked).encode()
        return (f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(data)}\r\n\r\n").encode() + data

    async def completion(self, asked: bytes, stream: bool) -> int:
        """Tokens of one request, which must be all that were asked for."""
        self._writer.write(asked)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        if " 200 " not in head.partition("\r\n")[0]:
            raise RuntimeError(head)
        if not stream:
            length = int(head.partition("content-length:")[2].partition("\r\n")[0])
            return json.loads(await self._reader.readexactly(length))["usage"]["completion_tokens"]
        last = b""
        while not last.endswith(b"\r\n0\r\n\r\n"):
            part = await self._reader.read(1 << 20)
            if not part:
                raise RuntimeError("the stream ended early")
            last = last[-2000:] + part
        usage = last.rpartition(b'"completion_tokens":')[2]
        return int(usage.partition(b",")[0])

    def close(self) -> None:
        self._writer.close()


async def over_http(url: str, vocab_size: int, counts: list[int], isl: int, osl: int, repeats: int
                    ) -> dict[tuple[int, str], list[float]]:
    """Output tokens a second by concurrency and way of answering."""
    prompts, rates = Prompts(vocab_size, isl), dict[tuple[int, str], list[float]]()
    for count in counts:
        connections = [await Connection.to(url) for _ in range(count)]
        for way in FLOORS:
            found = rates[count, way] = []
            for repeat in range(repeats + 1):
                asked = [connection.asked(prompt, osl, way == "stream")
                         for connection, prompt in zip(connections, prompts.take(count), strict=True)]
                start = time.perf_counter()
                tokens = await asyncio.gather(*(connection.completion(data, way == "stream")
                                                for connection, data in zip(connections, asked, strict=True)))
                seconds = time.perf_counter() - start
                if sum(tokens) != count * osl:
                    raise RuntimeError(f"{sum(tokens)} tokens came, {count * osl} were asked for")
                found += [sum(tokens) / seconds] if repeat else []
            print(f"over http, {way} {count}: {np.median(found):.0f} tok/s", flush=True)
        for connection in connections:
            connection.close()
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
