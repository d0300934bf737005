"""Plans of loads, and sweeps of a real endpoint: repeated, resumable, the same prompts for everybody."""

import json

import pytest

from evals import load_sweep
from evals.endpoint import fixed_asks, peak_in_flight
from evals.errors import MeasureError
from evals.load_plan import LoadPlan, load_plan
from evals.load_sweep import asks_of, find_rate, sweep_endpoint
from evals.presets import PRESETS, preset
from evals.records import load_record
from evals.report import LatencySweep
from evals.workload import Prompts
from tests.evals.sse_server import Server


def plan(url="http://127.0.0.1:1", **fields):
    return LoadPlan.model_validate({
        "name": "p", "tokenizer": "t", "warmup": 1, "repeats": 2, "timeout_s": 5,
        "loads": [{"isl": 8, "osl": 4, "concurrency": [1, 3], "requests": 6}, {"isl": 8, "osl": 4, "rate": [60],
                                                                               "requests": 8}],
        "targets": [{"name": "server", "url": url, "model": "m"}], "objectives": {"ttft_ms": 3000}} | fields)


def test_a_sweep_of_closed_and_open_loops(tokenizer, tmp_path):
    with Server() as server:
        asked = plan(server.url)
        found = sweep_endpoint(asked, asked.targets[0], tokenizer, tmp_path / "out")
        count = len(server.seen)
    assert count == 2 * (6 + 6 + 8)
    assert load_record(tmp_path / "out", LatencySweep) == found
    assert [(cell.mode, cell.batch_size, cell.n, cell.isl, cell.osl) for cell in found.cells[:2]] == [
        ("closed", 1, 2, 8, 4), ("closed", 3, 2, 8, 4)]
    opened = found.cells[2]
    assert opened.mode == "open"
    assert [cell.answered for cell in found.cells] == [2 * 5, 2 * 5, 2 * 7], "the warm-up is not counted"
    assert opened.request_rate == 60
    assert opened.batch_size >= 1
    assert len(found.loads) == 6
    assert all(cell.goodput_req_s == pytest.approx(cell.req_s) for cell in found.cells)
    assert found.cells[0].ttft_ms == pytest.approx(
        sum(load.ttft_ms.p50 for load in found.loads[:2]) / 2)
    prompts = [tuple(body["prompt"]) for _, body in server.seen]
    assert len(set(prompts)) == count, "no prompt may come twice: a prefix cache would be measured"


def test_a_killed_sweep_goes_on(tokenizer, tmp_path, monkeypatch):
    real, calls = load_sweep.measure, []
    def stops(*arguments, **named):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **named)
    with Server() as server:
        asked = plan(server.url)
        monkeypatch.setattr(load_sweep, "measure", stops)
        with pytest.raises(KeyboardInterrupt):
            sweep_endpoint(asked, asked.targets[0], tokenizer, tmp_path / "out")
        found = sweep_endpoint(asked, asked.targets[0], tokenizer, tmp_path / "out")
    assert len(calls) == 3 + 4
    assert len(found.loads) == 6


def test_failures_mark_the_cell_and_leave_no_figures(tokenizer, tmp_path):
    with Server("500") as server:
        asked = plan(server.url, loads=[{"isl": 8, "osl": 4, "concurrency": [2], "requests": 4}])
        found = sweep_endpoint(asked, asked.targets[0], tokenizer, tmp_path / "out")
    [cell] = found.cells
    assert "500 Internal Server Error" in cell.invalid
    assert (cell.ttft_ms, cell.tpot_ms, cell.e2e_ms) == (None, None, None)
    assert (cell.req_s, cell.answered) == (0, 0)
    from toolkit.report.words import lengths  # what a table shows: nothing was achieved, whatever was asked for
    assert (cell.isl, cell.osl, lengths(cell)) == (8, 4, ("–", "–"))


def test_every_target_meets_the_same_prompts_and_each_repeat_others(tokenizer):
    asked = plan(targets=[{"name": "a", "url": "http://a", "model": "m"},
                          {"name": "b", "url": "http://b", "model": "m"}])
    point = asked.points()[2]
    first, second = (asks_of(point, asked, target, tokenizer, 0, None) for target in asked.targets)
    assert first == second
    again = asks_of(point, asked, asked.targets[0], tokenizer, 1, None)
    assert not {ask.prompt for ask in first} & {ask.prompt for ask in again}


@pytest.mark.parametrize("bos", [False, True])
def test_text_prompts_have_exactly_their_length(tokenizer, bos_tokenizer, bos):
    chosen = bos_tokenizer if bos else tokenizer
    for ask in fixed_asks(chosen, 12, 2, 10, prompting="text"):
        assert chosen.encode(ask.text) == list(ask.prompt)
        assert len(ask.prompt) == 12
    with Server() as server:
        asked = plan(server.url, targets=[{"name": "s", "url": server.url, "model": "m", "prompts": "text",
                                           "ignore_eos": False}])
        asks = asks_of(asked.points()[0], asked, asked.targets[0], chosen, 0, None)
        from evals.endpoint import measure
        measure(server.url, asks, load_sweep.load_of(asked.points()[0], asked, asked.targets[0]))
    assert all(isinstance(body["prompt"], str) and "ignore_eos" not in body for _, body in server.seen)
    with pytest.raises(MeasureError, match="no room"):
        Prompts(bos_tokenizer, 0, words=True).batch(1, 1, "x")


def test_a_trace_is_replayed(tokenizer, tmp_path):
    rows = [{"timestamp": 40 * n, "input_length": 6 + n, "output_length": 2} for n in range(5)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Server() as server:
        asked = plan(server.url, loads=[{"trace": "trace.jsonl"}], repeats=1)
        found = sweep_endpoint(asked, asked.targets[0], tokenizer, tmp_path / "out", folder=tmp_path)
    assert sorted(len(body["prompt"]) for _, body in server.seen) == [6, 7, 8, 9, 10]
    assert found.cells[0].mode == "open"


def test_the_highest_rate_under_an_objective(tokenizer, unhurried):
    with Server() as server:
        asked = plan(server.url, loads=[{"isl": 8, "osl": 2, "rate": [1], "requests": 20}], repeats=1)
        rate, tried = find_rate(asked, asked.targets[0], tokenizer, (20.0, 80.0))
    assert (rate, len(tried)) == (80.0, 2)
    with pytest.raises(MeasureError, match="needs one pair of lengths"):
        find_rate(plan(objectives=None), asked.targets[0], tokenizer, (1.0, 2.0))


@pytest.mark.parametrize(("load", "words"), [
    ({"isl": 8}, "isl and osl"), ({"preset": "chat"}, "concurrency"), ({"preset": "chat", "isl": 4, "osl": 4,
                                                                       "rate": [1]}, "its own lengths"),
    ({"isl": 8, "osl": 8, "concurrency": [0]}, "positive"), ({"isl": 8, "osl": 8, "concurrency": [1],
                                                             "burstiness": 0.5}, "burstiness"),
    ({"trace": "t", "rate": [1]}, "its own lengths and times"), ({"isl": 8, "osl": 8, "rate": [1], "requests": 1},
                                                                "leave none"), ({"concurrency": [1]}, "preset")])
def test_plans_that_make_no_sense(load, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        plan(loads=[load])
    file = tmp_path / "plan.yaml"
    file.write_text(json.dumps({"name": "p", "tokenizer": "t", "loads": [load], "targets": [
        {"name": "s", "url": "http://h", "model": "m"}]}))
    with pytest.raises(MeasureError, match=words):
        load_plan(file)


def test_plan_files(tmp_path):
    from pathlib import Path

    example = load_plan(Path(__file__).parents[2] / "examples" / "sweep.yaml")
    assert [target.name for target in example.targets] == ["toolkit", "transformers"]
    assert len(example.points()) == 3
    with pytest.raises(MeasureError, match="cannot read"):
        load_plan(tmp_path / "absent.yaml")
    with pytest.raises(ValueError, match="different names"):
        plan(targets=2 * [{"name": "a", "url": "http://a", "model": "m"}])
    with pytest.raises(ValueError, match="twice"):
        plan(loads=2 * [{"isl": 8, "osl": 8, "concurrency": [1]}])


def test_presets_and_spans():
    assert preset("chat")[0] == (128, 128)
    assert all(isl > 0 and osl > 0 for pairs in PRESETS.values() for isl, osl in pairs)
    assert peak_in_flight([(0, 1), (1, 2), (0.5, 1.5)]) == 2
    assert peak_in_flight([]) == 0
