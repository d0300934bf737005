"""Load on a real HTTP server on loopback: healthy, slow, truncated, failing; arrivals, traces, search."""

import asyncio
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from evals.arrivals import offsets, read_trace
from evals.endpoint import (
    Ask,
    EndpointCell,
    Load,
    Objectives,
    fixed_asks,
    highest_rate,
    lag_p99,
    measure,
    spread,
    summarise,
    trace_asks,
)
from evals.errors import DataError, MeasureError
from evals.sse import Answer, Endpoint, complete
from tests.evals.sse_server import GAP, TTFT, Server


def asks(n, osl=4, times=None):
    return [Ask(prompt=tuple(range(i, i + 8)), osl=osl, at=None if times is None else float(times[i]))
            for i in range(n)]


def closed(**fields):
    return Load(model="m", concurrency=4, timeout_s=10, **fields)


@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_closed_loop(framing):
    with Server(framing=framing) as server:
        cell = measure(server.url + "/v1/", asks(16), closed(warmup=4, objectives=Objectives(ttft_ms=2000)), key="k")
    assert (cell.completed, cell.failed, cell.failures, cell.concurrency) == (12, 0, {}, 4.0)
    assert server.peak == 4
    assert (cell.isl, cell.osl, cell.cached_share) == (8.0, 4.0, 0.25)
    assert cell.ttft_ms.p50 >= 1e3 * TTFT
    assert cell.tpot_ms.p50 >= 1e3 * GAP
    assert cell.e2e_ms.mean == pytest.approx(cell.ttft_ms.mean + 3 * cell.tpot_ms.mean)
    assert cell.itl_gap_ms.mean == pytest.approx(cell.tpot_ms.mean)
    assert cell.ttft_ms.p99 is None
    assert cell.out_tok_s == pytest.approx(4 * cell.req_s)
    assert cell.total_tok_s == pytest.approx(12 * cell.req_s)
    assert (cell.good_share, cell.goodput_req_s) == (1.0, cell.req_s)
    head, body = server.seen[0]
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer k" in head
    assert (body["ignore_eos"], body["temperature"], body["stream_options"]) == (True, 0, {"include_usage": True})


def test_open_loop_sends_on_time_whatever_the_answers_do():
    with Server() as server:
        cell = measure(server.url, asks(20, times=offsets(20, 100.0)), Load(model="m", ignore_eos=False))
    assert cell.completed == 20
    assert cell.concurrency is None
    assert cell.lateness_ms >= 0
    assert server.peak > 1
    assert "ignore_eos" not in server.seen[0][1]


@pytest.mark.parametrize(("mode", "failure", "words"), [
    ("500", "status", "500 Internal Server Error"), ("truncated", "truncated", "4 of 4 requests failed"),
    ("error", "error", "out of memory"), ("malformed", "malformed", "nonsense"), ("empty", "empty", "without a token"),
    ("garbage", "malformed", "no HTTP status"), ("slow", "timeout", "no end after 0.5 s")])
def test_what_goes_wrong_is_a_kind_and_no_figure(mode, failure, words):
    with Server(mode) as server:
        cell = measure(server.url, asks(4), Load(model="m", concurrency=4, timeout_s=0.5))
    assert (cell.completed, cell.failed, cell.failures) == (0, 4, {failure: 4})
    assert words in cell.invalid
    assert (cell.ttft_ms.mean, cell.osl, cell.req_s) == (None, None, 0.0)


def test_a_stream_that_closes_without_done_is_truncated_under_any_framing():
    with Server("truncated", framing="close") as server:
        cell = measure(server.url, asks(2), closed())
    assert cell.failures == {"truncated": 2}
    assert "after 2 events without [DONE]" in cell.invalid


def test_a_finish_reason_ends_a_stream_as_well_as_done():
    with Server("nodone", framing="close") as server:
        cell = measure(server.url, asks(3), closed())
    assert (cell.completed, cell.failures, cell.osl) == (3, {}, 4.0)


def test_some_failures_mark_the_cell_and_never_count_as_good():
    with Server("some500") as server:
        cell = measure(server.url, asks(8), closed(objectives=Objectives(e2e_ms=5000)))
    assert (cell.completed, cell.failures, cell.good_share) == (6, {"status": 2}, 0.75)
    assert cell.invalid.startswith("2 of 8 requests failed (2 status)")
    assert cell.ttft_ms.p50 > 0


@pytest.mark.parametrize(("mode", "words"), [("short", "8 in and 4 out became 8 and 3"),
                                             ("silent", "token counts are unknown")])
def test_unequal_or_unknown_lengths_mark_the_cell(mode, words):
    with Server(mode) as server:
        cell = measure(server.url, asks(4), closed())
    assert cell.completed == 4
    assert words in cell.invalid


def test_nobody_there():
    with Server() as server:
        gone = server.url
    assert measure(gone, asks(2), closed()).failures == {"refused": 2}


def test_a_clock_that_jumps_back_is_a_failure():
    ticks = iter([5.0, 4.0, *range(6, 40)])
    with Server() as server:
        body = {"prompt": [1], "max_tokens": 2}
        answer = asyncio.run(complete(Endpoint.of(server.url), body, timeout_s=5, clock=lambda: float(next(ticks))))
    assert answer.failure == "clock"


def test_loads_that_cannot_be_measured():
    for made, load, words in ((asks(4), closed(warmup=2, cooldown=2), "leave none"),
                              (asks(2), Load(model="m"), "needs the time"),
                              (asks(2, times=[0, 1]), closed(), "no times of its own")):
        with pytest.raises(MeasureError, match=words):
            measure("http://127.0.0.1:1", made, load)
    for url in ("ftp://h", "127.0.0.1:80", "http://", "http://h?x=1", "http://h:abc", "http://h:99999", "http://[::1"):
        with pytest.raises(MeasureError, match="not the address"):
            Endpoint.of(url)
    with pytest.raises(MeasureError, match="API key"):
        Endpoint.of("http://h", "a\r\nX: y")
    assert "secret" not in repr(Endpoint.of("http://h", "secret"))
    with pytest.raises(ValidationError, match="without a limit"):
        Objectives()


def test_objectives_and_percentiles():
    both = Objectives(ttft_ms=100, tpot_ms=10)
    assert both.met(100, 10, 9999)
    assert both.met(50, None, 50)
    assert not both.met(101, 5, 0)
    assert not both.met(50, 11, 0)
    assert spread([]).mean is None
    assert spread([1.0, 2.0]).p90 == pytest.approx(1.9)
    assert spread(list(range(101))).p99 == pytest.approx(99.0)


def test_arrivals_have_the_rate_and_burstiness():
    for burstiness in (0.25, 1.0, 4.0):
        times = offsets(4000, 8.0, burstiness=burstiness, seed=1)
        gaps = np.diff(times)
        assert times[-1] == pytest.approx(500.0)
        assert (gaps >= 0).all()
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness ** -0.5, rel=0.1)
    assert (offsets(10, 1.0, seed=3) == offsets(10, 1.0, seed=3)).all()
    for bad in ((0, 1.0, 1.0), (1, 0.0, 1.0), (1, 1.0, 0.0), (1, float("nan"), 1.0)):
        with pytest.raises(MeasureError, match="no load"):
            offsets(bad[0], bad[1], burstiness=bad[2])


def test_traces(tmp_path, tokenizer):
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 1000, "input_length": 12, "output_length": 3}
    path.write_text(json.dumps(row) + "\n\n" + json.dumps({**row, "timestamp": 1500}) + "\n")
    first, second = trace_asks(tokenizer, read_trace(path))
    assert (first.at, second.at, len(first.prompt), first.osl) == (0.0, 0.5, 12, 3)
    assert first.prompt != second.prompt
    for content, words in (("", "no requests"), ("{", "line 1"), (json.dumps({**row, "hash_ids": [1]}), "hash_ids"),
                           (json.dumps(row) + "\n" + json.dumps({**row, "timestamp": 1}), "go back"),
                           (json.dumps({**row, "output_length": 0}), "output_length")):
        path.write_text(content)
        with pytest.raises(DataError, match=words):
            read_trace(path)
    with pytest.raises(DataError, match="cannot read"):
        read_trace(tmp_path / "absent")


def test_fixed_asks_are_unique_and_exact(tokenizer):
    made = fixed_asks(tokenizer, 16, 4, 20, times=offsets(20, 5.0))
    assert len({ask.prompt for ask in made}) == 20
    assert {(len(ask.prompt), ask.osl) for ask in made} == {(16, 4)}
    assert made[-1].at == pytest.approx(4.0)


def test_highest_rate_is_found_within_the_precision():
    def cell(rate, limit):
        return EndpointCell(tool="t", completed=1, client_lag_ms=0, good_share=1.0 if rate <= limit else 0.2)
    rate, cells = highest_rate(lambda rate: cell(rate, 13.0), 1.0, 100.0)
    assert 13.0 / 1.05 <= rate <= 13.0
    assert len(cells) < 12
    assert highest_rate(lambda rate: cell(rate, 0.5), 1.0, 100.0)[0] is None
    assert highest_rate(lambda rate: cell(rate, 500), 1.0, 100.0)[0] == 100.0
    marked = highest_rate(lambda rate: cell(rate, 500).model_copy(update={"invalid": "late"}), 1.0, 100.0)
    assert marked[0] is None
    with pytest.raises(MeasureError, match="without objectives"):
        highest_rate(lambda rate: cell(rate, 1).model_copy(update={"good_share": None}), 1.0, 2.0)
    with pytest.raises(MeasureError, match="no search"):
        highest_rate(lambda rate: SimpleNamespace(), 2.0, 1.0)


def test_a_late_client_marks_the_cell():
    answer = Answer(start=0.0, end=0.1, times=[0.02, 0.05], prompt_tokens=8, output_tokens=2)
    [ask] = asks(1, osl=2, times=[0.0])
    late = summarise([ask], [answer], [0.2], 0.0, Load(model="m"))
    assert "the client was held up by 200.0 ms with a median TTFT of 20.0 ms" in late.invalid
    assert summarise([ask], [answer], [0.001], 0.001, Load(model="m")).invalid is None
    held = summarise([ask], [answer], [0.0], 0.2, Load(model="m"))
    assert "held up by 200.0 ms" in held.invalid


def test_lag_is_weighted_by_time():
    assert lag_p99([], 1.0) == 0.0
    assert lag_p99([0.0] * 1000, 10.0) == 0.0
    assert lag_p99([0.05] + [0.0] * 900, 10.0) == 0.0
    assert lag_p99([0.2] + [0.0] * 900, 10.0) == 0.2
    assert lag_p99([0.08, 0.03] + [0.0] * 900, 10.0) == 0.03


def test_a_client_that_blocks_itself_is_noticed(monkeypatch):
    """Real hold-ups of the real loop: every request body takes 60 ms to make."""
    def slow(self, body, made=Endpoint.request):
        time.sleep(0.06)
        return made(self, body)
    monkeypatch.setattr(Endpoint, "request", slow)
    with Server() as server:
        cell = measure(server.url, asks(8), closed())
    assert cell.client_lag_ms > 40
    assert "the client was held up by" in cell.invalid
