"""The load of ``serve_soak``: the seeded mix of requests, and one round of it with every answer judged."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

MODEL = "soak"
#: Nats between the two best tokens below which another batch may choose the other one (float32 sums in another order).
TIE = 1e-3
_WORDS = ("river", "engine", "number", "library", "reader", "lamp", "town", "road", "figure", "window", "Grüße", "漢字")
_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "n": {"type": "integer", "minimum": 0,
           "maximum": 99}}, "required": ["a", "n"], "additionalProperties": False}
_BAD_BODIES = [b"{", b"\xff\xfe", b"[" * 50_000, b'{"a":' * 3000, b'{"model": "soak", "prompt": "a", "seed": NaN}',
               json.dumps({"model": MODEL, "prompt": "a", "nonsense": 1}).encode(),
               json.dumps({"model": MODEL, "prompt": "a", "temperature": -1}).encode(),
               json.dumps({"model": "other", "prompt": "a"}).encode(),
               json.dumps({"model": MODEL, "prompt": "\ud800"}).encode()]
_BAD_FORMATS = [{"type": "regex", "regex": "(a{1,1000}){1,1000}(b{1,1000}){1,1000}x"}, {"type": "regex", "regex": "a("},
                {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "what"}}},
                {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/$defs/missing"}}}]
#: Kind of request -> its share.
MIX = {"greedy": 30, "stream": 24, "seeded": 10, "schema": 6, "drop": 10, "cancel": 6, "bad": 6, "over": 4, "format": 4}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the mix."""

    kind: str
    prompt: str
    count: int
    number: int
    priority: int = 0


@dataclass(slots=True)
class Result:
    """What a round, or all of them, came to."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    ties: int = 0
    tokens: int = 0
    seconds: float = 0.0
    memory: list[int] = field(default_factory=list)
    queue_p99_s: float = 0.0


def make_mix(count: int, longest: int, seed: int) -> list[Ask]:
    """A seeded mix; half of the prompts begin like others. ``longest`` is in tokens of at least one character."""
    draw = random.Random(seed)
    stems = [" ".join(draw.choices(_WORDS, k=20)) for _ in range(4)]
    asks = []
    for number, kind in enumerate(draw.choices(list(MIX), list(MIX.values()), k=count)):
        body = " ".join(draw.choices(_WORDS, k=draw.choice([1, 3, 10, 30])))[:longest // 3]
        prompt = (draw.choice(stems)[:longest // 4] + " " + body) if draw.random() < 0.5 else body
        if kind == "over":
            prompt = "word " * (10_000 if draw.random() < 0.5 else longest + 1)
        asks.append(Ask(kind, prompt, draw.choice([1, 4, 12, 24, 40]), number, draw.choice([0, 0, 0, -1, 2])))
    return asks


class Round:
    """One pass over the mix."""

    def __init__(self, url: str, asks: list[Ask], answers: dict[int, tuple[str, float]], seeded: dict[int, str],
                 in_flight: int) -> None:
        limits = httpx.Limits(max_connections=in_flight + 8)
        self._http = httpx.AsyncClient(base_url=url, timeout=300, limits=limits)
        self._asks, self._answers, self._seeded = asks, answers, seeded
        self._in_flight = in_flight
        self.result = Result()
        self._kinds = {"greedy": self._greedy, "stream": self._stream, "seeded": self._seeded_once,
                       "schema": self._schema, "drop": self._drop, "cancel": self._cancel, "bad": self._bad,
                       "over": self._over, "format": self._format}

    async def run(self) -> Result:
        start = time.monotonic()
        places = asyncio.Semaphore(self._in_flight)

        async def one(ask: Ask) -> None:
            async with places:
                try:
                    await self._kinds[ask.kind](ask)
                except Exception as error:  # whatever a client sees that is no answer is a fault of the server
                    self._fault(ask, f"{type(error).__name__}: {error}")
        odd = [asyncio.create_task(self._slow_reader()), asyncio.create_task(self._never_reads())]
        await asyncio.gather(*(one(ask) for ask in self._asks))
        await asyncio.gather(*odd)
        self.result.seconds = time.monotonic() - start
        return self.result

    async def close(self) -> None:
        await self._http.aclose()

    def _fault(self, ask: Ask, words: str) -> None:
        self.result.faults.append(f"{ask.kind} {ask.number}: {words}"[:400])

    def _body(self, ask: Ask, **more: object) -> dict[str, object]:
        return {"model": MODEL, "prompt": ask.prompt, "max_tokens": ask.count, "temperature": 0,
                "priority": ask.priority, **more}

    def _compare(self, ask: Ask, text: str) -> None:
        expected, gap = self._answers[ask.number]
        if text == expected:
            self.result.ends["right"] += 1
        elif gap < TIE:
            self.result.ends["right but for a tie"] += 1
            self.result.ties += 1
        else:
            self._fault(ask, f"answered {text!r}, alone {expected!r} (gap {gap:.4f})")

    async def _greedy(self, ask: Ask) -> None:
        answer = await self._http.post("/v1/completions", json=self._body(ask))
        document = answer.raise_for_status().json()
        self.result.tokens += document["usage"]["completion_tokens"]
        self._compare(ask, document["choices"][0]["text"])

    async def _stream(self, ask: Ask) -> None:
        text, last = "", ""
        async with self._http.stream("POST", "/v1/completions", json=self._body(ask, stream=True)) as stream:
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                last = line.removeprefix("data: ") or last
                if line and last != "[DONE]":
                    self.result.tokens += 1
                    text += json.loads(last)["choices"][0]["text"]
        if last != "[DONE]":
            self._fault(ask, "the stream has no end")
        self._compare(ask, text)

    async def _seeded_text(self, ask: Ask) -> str:
        body = self._body(ask, temperature=1, seed=ask.number, top_p=0.9)
        answer = await self._http.post("/v1/completions", json=body)
        return answer.raise_for_status().json()["choices"][0]["text"]

    async def _seeded_once(self, ask: Ask) -> None:
        text = await self._seeded_text(ask)
        if self._seeded.setdefault(ask.number, text) != text:
            self.result.ends["seeded, another answer"] += 1
        else:
            self.result.ends["seeded"] += 1

    async def _schema(self, ask: Ask) -> None:
        answer = await self._http.post("/v1/chat/completions", json={
            "model": MODEL, "messages": [{"role": "user", "content": ask.prompt}], "max_tokens": 60, "seed": ask.number,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}})
        choice = answer.raise_for_status().json()["choices"][0]
        if choice["finish_reason"] == "stop" and set(json.loads(choice["message"]["content"])) != {"a", "n"}:
            self._fault(ask, choice["message"]["content"])
        self.result.ends[f"schema {choice['finish_reason']}"] += 1

    async def _drop(self, ask: Ask) -> None:
        """Take a part of a stream, which must be the beginning of the answer, and leave."""
        text, expected = "", self._answers[ask.number]
        async with self._http.stream("POST", "/v1/completions", json=self._body(ask, stream=True)) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    break
        if not expected[0].startswith(text) and expected[1] >= TIE:
            self._fault(ask, f"began {text!r}, alone {expected[0]!r}")
        self.result.ends["dropped"] += 1

    async def _cancel(self, ask: Ask) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01 * (ask.number % 7)):
                await self._http.post("/v1/completions", json=self._body(ask, ignore_eos=True))
        self.result.ends["cancelled"] += 1

    async def _refused(self, ask: Ask, answer: httpx.Response) -> None:
        if answer.status_code not in (400, 404, 413) or not answer.json()["error"]["message"]:
            self._fault(ask, f"{answer.status_code} {answer.text[:200]}")
        self.result.ends[f"refused {answer.status_code}"] += 1

    async def _bad(self, ask: Ask) -> None:
        body = _BAD_BODIES[ask.number % len(_BAD_BODIES)]
        await self._refused(ask, await self._http.post("/v1/completions", content=body))

    async def _over(self, ask: Ask) -> None:
        await self._refused(ask, await self._http.post("/v1/completions", json=self._body(ask)))

    async def _format(self, ask: Ask) -> None:
        """A format that cannot be used is refused, or its answer ends; neither takes long."""
        answer = await self._http.post("/v1/chat/completions", json={
            "model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 8,
            "response_format": _BAD_FORMATS[ask.number % len(_BAD_FORMATS)]})
        if answer.status_code not in (200, 400, 500):
            self._fault(ask, f"{answer.status_code} {answer.text[:200]}")
        self.result.ends[f"format {answer.status_code}"] += 1

    async def _slow_reader(self) -> None:
        body = {"model": MODEL, "prompt": "slow", "max_tokens": 40, "ignore_eos": True, "stream": True}
        async with self._http.stream("POST", "/v1/completions", json=body) as stream:
            async for _ in stream.aiter_raw(64):
                await asyncio.sleep(0.005)
        self.result.ends["read slowly"] += 1

    async def _never_reads(self) -> None:
        """Ask for streams and read nothing of them until the end."""
        host, port = str(self._http.base_url.host), self._http.base_url.port
        body = json.dumps({"model": MODEL, "prompt": "never", "max_tokens": 100, "n": 4, "ignore_eos": True,
                           "stream": True}).encode()
        _, writer = await asyncio.open_connection(host, port, limit=1024)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await writer.drain()
        await asyncio.sleep(2.0)
        writer.close()
        self.result.ends["never read"] += 1
