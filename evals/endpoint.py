"""Load on any OpenAI endpoint: offered load in, latency under that load out.

    closed loop   ``concurrency`` users, each asking again when answered: the server's best throughput at that depth
    open loop     requests sent at given times whatever the answers do (``evals.arrivals``): what users will feel

Prompts are unique (``evals.workload``), so no prefix cache is measured by accident. They are token ids, so that lengths
are exact; for a server that takes text only, words that are one token each. What the server counted is checked against
what was asked, and its hit rate is kept.
Per request: ttft = first token - start, tpot = (last token - ttft - start)/(n - 1), e2e = last token - start.
``warmup`` requests at the beginning and ``cooldown`` at the end are sent and not counted, so that filling and draining
do not flatter the figures. Percentiles interpolate linearly; p99 of fewer than 100 requests is not given.

**The client is measured too**: how late requests were sent in an open loop, and how long the event loop was held up. A
cell is kept and marked ``invalid``, with the reason, when requests failed, lengths differ, or the client was late by
more than a tenth of the median TTFT (at least 5 ms): then it is the client that was measured.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from calib.scheme import Frozen
from calib.text import Tokenizer
from evals.arrivals import TraceRow
from evals.errors import LoadError, MeasureError
from evals.loads import EndpointCell, Objectives, Spread
from evals.sse import Answer, Endpoint, complete
from evals.workload import Prompts

_LAG_EVERY = 0.01


Prompting = Literal["ids", "text"]


class Ask(Frozen):
    """One request: its token ids (and ``text``, if that is what is sent), how many tokens it wants, and when it is sent
    (open loop; seconds after start)."""

    prompt: tuple[int, ...] = Field(min_length=1)
    text: str | None = None
    osl: int = Field(ge=1)
    at: float | None = Field(default=None, ge=0)


class Load(Frozen):
    """How to ask. Without ``concurrency`` the asks' own times are kept (open loop). ``ignore_eos`` needs a server that
    knows it (vLLM, SGLang, ours); without it outputs may end early and the cell says so."""

    model: str = Field(min_length=1)
    concurrency: int | None = Field(default=None, ge=1)
    warmup: int = Field(default=0, ge=0)
    cooldown: int = Field(default=0, ge=0)
    timeout_s: float = Field(default=600.0, gt=0)
    ignore_eos: bool = True
    objectives: Objectives | None = None


def fixed_asks(tokenizer: Tokenizer, isl: int, osl: int, n: int, *, times: Sequence[float] | None = None,
               seed: int = 0, prompting: Prompting = "ids") -> list[Ask]:
    """``n`` unique random prompts of ``isl`` tokens; ``times`` (``arrivals.offsets``) for an open loop."""
    prompts = Prompts(tokenizer, seed, words=prompting == "text")
    rows = prompts.batch(n, isl, f"endpoint isl={isl} osl={osl}")
    due: Sequence[float | None] = [None] * n if times is None else [float(moment) for moment in times]
    return [Ask(prompt=tuple(row), osl=osl, at=moment, text=_text(tokenizer, row, prompting))
            for row, moment in zip(rows, due, strict=True)]


def trace_asks(tokenizer: Tokenizer, rows: Sequence[TraceRow], *, seed: int = 0, prompting: Prompting = "ids"
               ) -> list[Ask]:
    """Unique random prompts with a trace's lengths and times."""
    prompts, asks = Prompts(tokenizer, seed, words=prompting == "text"), []
    for number, row in enumerate(rows):
        [ids] = prompts.batch(1, row.input_length, f"trace {number}")
        asks.append(Ask(prompt=tuple(ids), osl=row.output_length, at=row.timestamp / 1e3,
                        text=_text(tokenizer, ids, prompting)))
    return asks


def _text(tokenizer: Tokenizer, ids: Sequence[int], prompting: Prompting) -> str | None:
    """The text that a server will encode to ``ids``; MeasureError when it would not."""
    if prompting == "ids":
        return None
    text = tokenizer.decode(ids)
    if tokenizer.encode(text) != list(ids):
        raise MeasureError(f"a prompt of {len(ids)} tokens has {len(tokenizer.encode(text))} when it is sent as text",
                           "Send token ids, or measure with another tokenizer.")
    return text


def measure(url: str, asks: Sequence[Ask], load: Load, *, key: str | None = None) -> EndpointCell:
    """Send the load and sum it up. LoadError for a load that makes no sense; what the server does is in the cell.

    An API ``key`` goes into the requests only.
    """
    if len(asks) <= load.warmup + load.cooldown:
        raise LoadError(f"{len(asks)} requests with {load.warmup} warm-up and {load.cooldown} cool-down leave none",
                           "Send more requests.")
    if load.concurrency is None and any(ask.at is None for ask in asks):
        raise LoadError("an open loop needs the time of every request", "Give times, or a concurrency.")
    if load.concurrency is not None and any(ask.at is not None for ask in asks):
        raise LoadError("a closed loop has no times of its own", "Give times or a concurrency, not both.")
    answers, late, lag = asyncio.run(_send(Endpoint.of(url, key), asks, load))
    kept = slice(load.warmup, len(asks) - load.cooldown)
    return summarise(asks[kept], answers[kept], late[kept], lag, load)


async def _send(endpoint: Endpoint, asks: Sequence[Ask], load: Load) -> tuple[list[Answer], list[float], float]:
    """(answers, seconds each was sent late, the loop's ``lag_p99``), in the order of ``asks``."""
    late: list[float] = [0.0] * len(asks)
    lags: list[float] = []
    begin = time.perf_counter()
    gate = asyncio.Semaphore(load.concurrency) if load.concurrency else None

    async def one(number: int, ask: Ask) -> Answer:
        if gate is not None:
            async with gate:
                return await complete(endpoint, _body(ask, load), timeout_s=load.timeout_s)
        due = begin + (ask.at or 0.0)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        late[number] = time.perf_counter() - due
        return await complete(endpoint, _body(ask, load), timeout_s=load.timeout_s)

    watch = asyncio.create_task(_watch_lag(lags))
    try:
        answers = await asyncio.gather(*(one(number, ask) for number, ask in enumerate(asks)))
    finally:
        watch.cancel()
    return list(answers), late, lag_p99(lags, time.perf_counter() - begin)


async def _watch_lag(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_LAG_EVERY)
        lags.append(max(0.0, time.perf_counter() - before - _LAG_EVERY))


def lag_p99(lags: Sequence[float], wall: float) -> float:
    """The hold-up (s) that 1 % of ``wall`` exceeds: weighted by time, because a hold-up also holds up its witness."""
    held = 0.0
    for lag in sorted(lags, reverse=True):
        held += lag
        if held > 0.01 * wall:
            return lag
    return 0.0


def _body(ask: Ask, load: Load) -> dict[str, Any]:
    prompt = list(ask.prompt) if ask.text is None else ask.text
    body = {"model": load.model, "prompt": prompt, "max_tokens": ask.osl, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}
    return body | {"ignore_eos": True} if load.ignore_eos else body


def summarise(asks: Sequence[Ask], answers: Sequence[Answer], late: Sequence[float], lag: float, load: Load
              ) -> EndpointCell:
    """The cell of the counted requests: pure. Figures over completed ones; rates over first start to last end."""
    done = [(ask, answer) for ask, answer in zip(asks, answers, strict=True) if answer.failure is None]
    failures = Counter(answer.failure for answer in answers if answer.failure is not None)
    wall = max(answer.end for answer in answers) - min(answer.start for answer in answers)
    times = [_times(answer) for _, answer in done]
    ttft = spread([first for first, _, _ in times])
    out, inp = (_total([getattr(answer, name) for _, answer in done]) for name in ("output_tokens", "prompt_tokens"))
    good = None if load.objectives is None else sum(load.objectives.met(*one) for one in times)
    lateness = None if load.concurrency else float(np.quantile(late, 0.99)) * 1e3
    cached = _total([answer.cached_tokens for _, answer in done])
    span = max((ask.at or 0.0) for ask in asks) - min((ask.at or 0.0) for ask in asks)
    return EndpointCell(
        tool="toolkit", model=load.model, completed=len(done), failed=len(answers) - len(done),
        failures=dict(failures), duration_s=wall, concurrency=load.concurrency,
        request_rate=(len(asks) - 1) / span if span > 0 else None, ttft_ms=ttft,
        tpot_ms=spread([gap for _, gap, _ in times if gap is not None]),
        e2e_ms=spread([whole for _, _, whole in times]),
        itl_gap_ms=spread([float(gap) for _, answer in done for gap in np.diff(answer.times) * 1e3]),
        isl=inp / len(done) if inp is not None and done else None, req_s=len(done) / wall,
        osl=out / len(done) if out is not None and done else None, out_tok_s=None if out is None else out / wall,
        total_tok_s=None if out is None or inp is None else (out + inp) / wall,
        goodput_req_s=None if good is None else good / wall, good_share=None if good is None else good / len(answers),
        peak_in_flight=peak_in_flight([(answer.start, answer.end) for answer in answers]),
        cached_share=None if cached is None or not inp else cached / inp, lateness_ms=lateness,
        client_lag_ms=1e3 * lag, invalid=_invalid(done, answers, failures, ttft.p50, max(lateness or 0.0, 1e3 * lag)))


def peak_in_flight(spans: Sequence[tuple[float, float]]) -> int:
    """Most spans that are open at one time; one that ends when another begins has ended before."""
    events = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    return int(np.cumsum([step for _, step in events]).max(initial=0))


def _times(answer: Answer) -> tuple[float, float | None, float]:
    """(ttft, tpot, e2e) in ms of a completed answer."""
    first, last = answer.times[0] - answer.start, answer.times[-1] - answer.start
    tokens = answer.output_tokens
    gap = (last - first) / (tokens - 1) * 1e3 if tokens is not None and tokens > 1 else None
    return first * 1e3, gap, last * 1e3


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def spread(values: Sequence[float]) -> Spread:
    """Mean and percentiles (linear interpolation); p99 only from 100 values on, nothing of none."""
    if not len(values):
        return Spread()
    p50, p90, p99 = (float(value) for value in np.quantile(values, (0.5, 0.9, 0.99)))
    return Spread(mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99 if len(values) >= 100 else None)


def _invalid(done: Sequence[tuple[Ask, Answer]], answers: Sequence[Answer], failures: Counter[str],
             ttft: float | None, late_ms: float) -> str | None:
    """Why the cell must not be used: every reason, or None."""
    reasons = []
    if failures:
        example = next(answer.detail for answer in answers if answer.failure is not None)
        kinds = ", ".join(f"{count} {word}" for word, count in failures.most_common())
        reasons.append(f"{failures.total()} of {len(answers)} requests failed ({kinds}): {example}")
    if silent := sum(answer.output_tokens is None for _, answer in done):
        reasons.append(f"{silent} answers without usage: token counts are unknown")
    wrong = [(ask, answer) for ask, answer in done if answer.output_tokens is not None and
             (answer.output_tokens != ask.osl or answer.prompt_tokens != len(ask.prompt))]
    if wrong:
        ask, answer = wrong[0]
        reasons.append(f"{len(wrong)} requests had other lengths: {len(ask.prompt)} in and {ask.osl} out became "
                       f"{answer.prompt_tokens} and {answer.output_tokens}")
    if ttft is not None and late_ms > max(5.0, ttft / 10):
        reasons.append(f"the client was held up by {late_ms:.1f} ms with a median TTFT of {ttft:.1f} ms")
    return "; ".join(reasons) or None


def highest_rate(measured: Callable[[float], EndpointCell], low: float, high: float, *, share: float = 0.9,
                 precision: float = 0.05) -> tuple[float | None, list[tuple[float, EndpointCell]]]:
    """The highest request rate at which ``share`` of requests is good, by bisection between ``low`` and ``high``.

    ``measured(rate)`` runs one open-loop cell with objectives. Returns (rate within ``precision`` of the best, or None
    when even ``low`` fails; every cell measured). An invalid cell counts as failing. LoadError for bad bounds.
    """
    if not 0 < low < high or not 0 < share <= 1 or not 0 < precision < 1:
        raise LoadError(f"rates {low} to {high}, share {share}, precision {precision} give no search",
                           "Give 0 < low < high, 0 < share <= 1 and 0 < precision < 1.")
    cells: list[tuple[float, EndpointCell]] = []

    def holds(rate: float) -> bool:
        cell = measured(rate)
        cells.append((rate, cell))
        if cell.good_share is None:
            raise LoadError("the cell was measured without objectives", "Give the load its objectives.")
        return cell.invalid is None and cell.good_share >= share

    if not holds(low):
        return None, cells
    if holds(high):
        return high, cells
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, cells
