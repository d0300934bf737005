"""The sweep's arithmetic on a clock that is known, its refusals and resuming, and a real engine end to end."""

import json

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from calib.artifact import Artifact
from calib.errors import ArtifactError
from engines.llm import LLM
from engines.request import CompletionOutput, RequestOutput
from evals import latency
from evals.errors import MeasureError
from evals.fidelity import EvalSettings, evaluate, make_baseline
from evals.latency import measure_cell, sweep
from evals.memory import measure_peak, peak_during
from evals.module import ModuleScorer
from evals.records import load_record
from evals.report import LatencySweep
from evals.target import Generator, Scorer, describe
from evals.workload import Prompts


class Clock:
    """A generator on a made-up clock: prefill takes 10 ms a request, a step 2 ms, each call a different fixed delay."""

    def __init__(self, tokenizer, monkeypatch, *, delays=(0.0,), short=0, prefix=0, dies_after=None):
        self.tokenizer, self.now, self.seen = tokenizer, 0.0, []
        self.delays, self.short, self.prefix, self.dies_after = delays, short, prefix, dies_after
        monkeypatch.setattr(latency.time, "perf_counter", lambda: self.now)

    def generate(self, prompts, params):
        if self.dies_after is not None and len(self.seen) >= self.dies_after:
            raise KeyboardInterrupt
        assert params.ignore_eos
        self.now += self.delays[len(self.seen) % len(self.delays)]
        self.now += 0.010 * len(prompts) + 0.002 * (params.max_tokens - 1)
        self.seen.append(prompts)
        return [RequestOutput(p[self.prefix:], [CompletionOutput(0, "", [5] * (params.max_tokens - self.short), None,
                                                                 "length")]) for p in prompts]


def test_figures_are_the_documented_formulas(tokenizer, monkeypatch, tmp_path):
    clock = Clock(tokenizer, monkeypatch)
    record = sweep(clock, describe("e", "e" * 64, "n", tokenizer), [(4, 16, 11)], device="cpu", out=tmp_path / "s")
    cell = record.cells[0]
    assert (cell.ttft_ms, cell.tpot_ms, cell.e2e_ms) == pytest.approx((40.0, 2.0, 60.0))
    assert cell.out_tok_s == pytest.approx(4 * 11 / 0.060)
    assert cell.total_tok_s == pytest.approx(4 * 27 / 0.060)
    assert (cell.ttft_ms_spread, cell.tpot_ms_spread) == pytest.approx((0, 0), abs=1e-9)
    assert (cell.n, cell.invalid, record.peak_memory_bytes) == (3, None, None)
    assert len(clock.seen) == 2 * (1 + 3)
    assert load_record(tmp_path / "s", LatencySweep) == record


def test_medians_and_spread_over_repeats_and_warmup_is_thrown_away(tokenizer, monkeypatch):
    clock = Clock(tokenizer, monkeypatch, delays=(9.0, 9.0, 0.001, 0.0, 0.002, 0.0, 0.006, 0.0))
    cell = measure_cell(clock, Prompts(tokenizer, 0), (1, 8, 11), warmup=1, repeats=3)
    assert cell.ttft_ms == pytest.approx(12.0)
    assert cell.ttft_ms_spread == pytest.approx(5.0)
    assert cell.e2e_ms == pytest.approx(30.0)
    assert cell.tpot_ms == pytest.approx(1.8)
    assert cell.tpot_ms_spread == pytest.approx(0.5)


def test_one_output_token_has_no_tpot(tokenizer, monkeypatch):
    cell = measure_cell(Clock(tokenizer, monkeypatch), Prompts(tokenizer, 0), (2, 8, 1), warmup=0, repeats=2)
    assert (cell.tpot_ms, cell.tpot_ms_spread, cell.invalid) == (None, None, None)
    assert cell.ttft_ms == cell.e2e_ms == pytest.approx(20.0)


@pytest.mark.parametrize(("fault", "words"), [
    ({"short": 1}, "output tokens were asked for"), ({"prefix": 2}, "an input of 8 tokens became 6"),
    ({"delays": (1.0, 0.0)}, "took no longer than one"),
])
def test_wrong_lengths_and_impossible_clocks_mark_the_cell(tokenizer, monkeypatch, fault, words):
    cell = measure_cell(Clock(tokenizer, monkeypatch, **fault), Prompts(tokenizer, 0), (2, 8, 5), warmup=0, repeats=2)
    assert words in cell.invalid


def test_prompts_are_unique_seeded_ordinary_and_of_exact_length(tokenizer, monkeypatch):
    clock = Clock(tokenizer, monkeypatch)
    for repeat in range(2):
        measure_cell(clock, Prompts(tokenizer, repeat), (3, 12, 4), warmup=1, repeats=2)
    prompts = [tuple(prompt) for batch in clock.seen for prompt in batch]
    assert len(set(prompts)) == len(prompts) == 2 * 18
    assert {len(prompt) for prompt in prompts} == {12}
    assert not {token for prompt in prompts for token in prompt} & {*tokenizer.special_ids, *tokenizer.eos_ids}
    assert Prompts(tokenizer, 7).batch(2, 9, "x") == Prompts(tokenizer, 7).batch(2, 9, "x")
    with pytest.raises(MeasureError, match="twice"):
        Prompts(tokenizer, 0).batch(1000, 1, "x")


def test_a_killed_sweep_goes_on_with_the_next_cell(tokenizer, monkeypatch, tmp_path):
    target, grid = describe("e", "e" * 64, "n", tokenizer), [(1, 8, 4), (2, 8, 4), (4, 8, 4)]
    whole = Clock(tokenizer, monkeypatch)
    sweep(whole, target, grid, device="cpu", out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        sweep(Clock(tokenizer, monkeypatch, dies_after=10), target, grid, device="cpu", out=tmp_path / "s")
    second = Clock(tokenizer, monkeypatch)
    sweep(lambda: second, target, grid, device="cpu", out=tmp_path / "s")
    assert len(second.seen) == 16
    first, alone = (Artifact.open(tmp_path / name).record["cells"][0] for name in ("s", "whole"))
    assert first | {"waited": None} == alone | {"waited": None}
    assert not (tmp_path / ".s.work").exists()


@pytest.mark.parametrize(("grid", "options", "words"), [
    ([], {}, "empty"), ([(1, 8, 4), (1, 8, 4)], {}, "doubled"), ([(0, 8, 4)], {}, "not positive"),
    ([(1, 8, 4)], {"repeats": 0}, "0 repeats"), ([(16, 8, 4)], {"max_batch_size": 8}, "batch 16 is above"),
])
def test_impossible_grids_are_refused(tokenizer, monkeypatch, tmp_path, grid, options, words):
    with pytest.raises(MeasureError, match=words):
        sweep(Clock(tokenizer, monkeypatch), describe("e", "e" * 64, "n", tokenizer), grid, device="cpu",
              out=tmp_path / "s", **options)


def test_peak_memory_sees_what_was_freed_again():
    held = []

    def work():
        held.append(np.ones(32_000_000))
        held.clear()
    peak = peak_during(work)
    assert 250e6 < peak < 280e6  # 256 MB, and some MB of what else comes and goes
    assert peak_during(lambda: None) < 10e6


def test_a_real_engine_is_swept_with_its_memory(engine, tokenizer, tmp_path):
    with LLM(engine) as llm:
        assert isinstance(llm, Scorer)
        assert isinstance(llm, Generator)
        target = describe("engine", engine.digest, llm.numerics, tokenizer)
        record = sweep(llm, target, [(1, 16, 40), (4, 16, 40)], device=engine.device, out=tmp_path / "s", warmup=1,
                       repeats=2, engine=engine.path, max_batch_size=engine.plan.limits.max_batch_size)
    assert [cell.invalid for cell in record.cells] == [None, None]
    assert all(cell.tpot_ms > 0 and cell.ttft_ms > 0 for cell in record.cells)
    assert 0 < record.peak_memory_bytes < 400e6
    assert json.loads(json.dumps(record.model_dump()))["target"]["digest"] == engine.digest


def test_memory_of_what_is_no_engine_or_does_not_fit_is_an_error(engine, tmp_path):
    with pytest.raises(ArtifactError, match="not an artifact"):
        measure_peak(tmp_path, 1, 8, 2)
    with pytest.raises(MeasureError, match=r"failed \(exit 1\)"):
        measure_peak(engine.path, 1, 100_000, 2)


def test_a_real_engine_is_judged_beside_its_module(engine, model_folder, tokenizer, data, tmp_path):
    """The engine adds no loss of its own: against transformers on the same weights its delta NLL is 0."""
    settings = EvalSettings(tasks=("facts",), limit_items=8, limit_texts=10, window=64, top_k=32)
    module = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    base = make_baseline(ModuleScorer(module, tokenizer), tokenizer, describe("module", "m" * 64, "fp32", tokenizer),
                         data, tmp_path / "b", settings=settings)
    with LLM(engine) as llm:
        report = evaluate(llm, tokenizer, describe("engine", engine.digest, llm.numerics, tokenizer), data, base,
                          tmp_path / "r", settings=settings)
    assert report.delta_nll.value == pytest.approx(0.0, abs=1e-4)
    assert report.kl_mean < 1e-4
    assert report.same_top1 > 0.995
    assert (report.flips, len(report.samples)) == (0.0, 4)
