"""The speed gate on recorded blocks, on simulated machines, and on real work."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from evals.errors import MeasureError
from evals.speed_gate import Block, SpeedGate, generation, judge_speed, noise_floor, ratio_of_medians, run_blocks


def blocks(slower=0.0, noise=0.01, n=24, seed=0, drift=0.0):
    rng = np.random.default_rng(seed)
    level = 1 + drift * np.linspace(0, 1, n)
    a, b = level * (1 + noise * rng.normal(size=n)), level * (1 + slower) * (1 + noise * rng.normal(size=n))
    return [Block(a=x, b=y) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize(("slower", "noise", "word"), [
    (0.0, 0.01, "PASS"), (-0.3, 0.01, "PASS"), (0.2, 0.01, "FAIL"), (0.06, 0.02, "INCONCLUSIVE"),
    (0.0, 0.3, "INCONCLUSIVE"), (2.0, 0.3, "FAIL")])
def test_words(slower, noise, word):
    verdict = judge_speed(blocks(slower, noise))
    assert verdict.reason.word == word, verdict
    assert verdict.ratio.n == 24
    assert verdict.ratio.ci_low <= verdict.ratio.value <= verdict.ratio.ci_high


def test_a_noisy_machine_says_so():
    assert "use a quieter machine" in judge_speed(blocks(0.0, 0.3)).reason.found


def test_drift_meets_both_alike():
    """A machine that slows down by half over the run: the ratio stays, the interval covers it."""
    verdict = judge_speed(blocks(0.0, 0.005, drift=0.5))
    assert verdict.ratio.value == pytest.approx(1.0, abs=0.02)
    assert verdict.reason.word != "FAIL"


def test_error_rates_on_simulated_machines():
    """Same speed is never red; 15 % slower is red nearly always (margin 5 %, 1 % noise)."""
    same = [judge_speed(blocks(0.0, 0.01, seed=seed)).reason.word for seed in range(40)]
    slow = [judge_speed(blocks(0.15, 0.01, seed=seed)).reason.word for seed in range(40)]
    assert "FAIL" not in same
    assert same.count("PASS") >= 38
    assert slow.count("FAIL") >= 38


def test_pure_and_seeded():
    assert judge_speed(blocks(0.06), SpeedGate(seed=3)) == judge_speed(blocks(0.06), SpeedGate(seed=3))
    assert ratio_of_medians(np.array([[1.0, 2.0], [3.0, 3.0], [2.0, 9.0]])) == 1.5
    assert noise_floor(np.ones(9), np.random.default_rng(0)) == 0.0


def test_too_few_blocks_and_bad_times():
    with pytest.raises(MeasureError, match="7 blocks"):
        judge_speed(blocks(n=7))
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValidationError):
            Block(a=bad, b=1.0)
    with pytest.raises(MeasureError, match="4 blocks"):
        run_blocks(lambda: None, lambda: None, blocks=4)


def test_runner_interleaves_and_warms_up():
    calls = []
    ticks = iter(range(1000))
    found = run_blocks(lambda: calls.append("a"), lambda: calls.append("b"), blocks=8, warmup=1,
                       clock=lambda: float(next(ticks)))
    assert "".join(calls) == "ab" + "abba" * 4
    assert [block.first for block in found] == ["a", "b"] * 4
    assert {(block.a, block.b) for block in found} == {(1.0, 1.0)}
    with pytest.raises(MeasureError, match="clock jumped"):
        run_blocks(lambda: None, lambda: None, blocks=8, clock=lambda: 5.0)


def test_real_work_that_takes_twice_as_long_fails():
    def work(seconds):
        return lambda: time.sleep(seconds)
    assert judge_speed(run_blocks(work(0.004), work(0.012), blocks=12)).reason.word == "FAIL"


class Echo:
    """A generator that answers any prompt with its first token, ``short`` tokens too few."""

    def __init__(self, tokenizer, short=0):
        self.tokenizer, self.short, self.seen = tokenizer, short, []

    def generate(self, prompts, params):
        self.seen.append(prompts)
        ids = params.max_tokens - self.short
        return [SimpleNamespace(prompt_token_ids=p, outputs=[SimpleNamespace(token_ids=[p[0]] * ids)]) for p in prompts]


def test_two_targets_get_the_same_fresh_prompts(tokenizer):
    one, two = Echo(tokenizer), Echo(tokenizer)
    run_blocks(generation(one, (2, 16, 4)), generation(two, (2, 16, 4)), blocks=8, warmup=1)
    assert one.seen == two.seen
    rows = [tuple(row) for batch in one.seen for row in batch]
    assert len(set(rows)) == len(rows) == 18
    with pytest.raises(MeasureError, match=r"lengths are \[3, 3\]"):
        generation(Echo(tokenizer, short=1), (2, 16, 4))()
