"""Sampling: distributions, truncation, seeds that do not know their batch, log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from chi_square import chi_square_p

from engines.kernels import sample_twin
from engines.request import SamplingParams, seed_of
from engines.runtime import sampler
from engines.runtime.sampler import Fault, adjust, sample, uniform
from engines.runtime.sequence import Sequence


def sequence(position: int = 1, seed: int = 0, stop_ids: frozenset[int] = frozenset(), **params: Any) -> Sequence:
    return Sequence(0, [0] * position, 1, SamplingParams(**params), seed, stop_ids)


def draws(logits: torch.Tensor, count: int, **params: Any) -> np.ndarray:
    rows = logits.repeat(count, 1)
    chosen = sample(rows, [sequence(position=index + 1, seed=11, **params) for index in range(count)])
    return np.bincount([token for token, _ in chosen], minlength=logits.numel()) / count


def test_uniform_depends_on_seed_and_position_only() -> None:
    assert uniform(3, 7) == uniform(3, 7)
    values = [uniform(seed, position) for seed in range(20) for position in range(50)]
    assert len(set(values)) == 1000
    assert min(values) >= 0
    assert max(values) < 1
    assert abs(np.mean(values) - 0.5) < 0.03


def test_temperature_zero_is_greedy() -> None:
    assert sample(torch.tensor([[0.0, 3.0, 1.0]]), [sequence()])[0] == (1, None)


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 1e-9, 1e-6])
def test_a_temperature_that_overflows_float32_draws_the_best_token(temperature: float) -> None:
    logits = torch.tensor([0.0, 30.0, -math.inf, 100.0, 99.0])
    assert draws(logits, 20, temperature=temperature).tolist() == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    found = draws(logits, 4000, temperature=temperature)
    assert np.abs(found - torch.softmax(logits / temperature, -1).numpy()).max() < 0.05


def test_top_k_and_top_p_truncate_and_renormalise() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits = probabilities.log()
    assert np.abs(draws(logits, 1500, temperature=1.0, top_k=2) - [4 / 7, 3 / 7, 0, 0]).max() < 0.05
    assert np.abs(draws(logits, 1500, temperature=1.0, top_p=0.65) - [4 / 7, 3 / 7, 0, 0]).max() < 0.05
    assert np.abs(draws(logits, 1500, temperature=1.0, top_p=0.75) - [4 / 9, 3 / 9, 2 / 9, 0]).max() < 0.05
    assert draws(logits, 200, temperature=1.0, top_p=1e-6).tolist() == [1, 0, 0, 0]
    # top-p counts within what top-k left: of {4/7, 3/7}, 0.5 is reached by the first alone
    assert draws(logits, 200, temperature=1.0, top_k=2, top_p=0.5).tolist() == [1, 0, 0, 0]
    assert draws(logits, 200, temperature=1.0, top_k=99)[3] > 0


def test_top_p_beyond_the_first_candidates() -> None:
    logits = torch.linspace(0.001, 0.0, 5000)
    found = draws(logits, 2000, temperature=1.0, top_p=0.5)
    assert (found > 0).sum() > 1000
    assert (found > 0).nonzero()[0].max() <= 2500


#: Two runs of ties; the boundaries of the rules below lie inside them. id 6 is impossible.
TIED = torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0, 2.0, -math.inf, 0.0, -1.0, 1.0])
TIED_RULES: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [0, 1, 2, 3, 4, 5, 7, 8, 9]), ({"top_k": 1}, [1, 5]), ({"top_k": 3}, [0, 1, 2, 4, 5, 9]),
    ({"top_p": 0.1}, [1, 5]), ({"top_p": 0.6}, [0, 1, 2, 4, 5, 9]), ({"top_p": 0.97}, [0, 1, 2, 3, 4, 5, 7, 9]),
    ({"top_k": 2, "top_p": 0.99}, [1, 5]), ({"min_p": 0.3}, [0, 1, 2, 4, 5, 9]),
    ({"temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.1}, [0, 1, 2, 4, 5, 9]),
    ({"logit_bias": {3: 2.0, 1: -50.0}}, [0, 2, 3, 4, 5, 7, 8, 9])]


@pytest.mark.parametrize(("rule", "kept"), TIED_RULES, ids=str)
def test_draws_have_the_exact_distribution_with_ties(rule: dict[str, Any], kept: list[int]) -> None:
    count = 4000
    params = {"temperature": 1.0} | rule
    chosen = sample(TIED.repeat(count, 1), [sequence(position=index % 7 + 1, seed=index, **params)
                                            for index in range(count)])
    row = TIED.double().clone()
    for index, bias in rule.get("logit_bias", {}).items():
        row[index] += bias
    wanted = torch.full_like(row, -math.inf)
    wanted[kept] = row[kept]
    counts = torch.bincount(torch.tensor([token for token, _ in chosen]), minlength=10)
    assert chi_square_p(counts, torch.softmax(wanted / rule.get("temperature", 1.0), 0)) > 1e-4


@pytest.mark.parametrize(("rule", "kept"), TIED_RULES[:-1], ids=str)
def test_what_is_kept_is_what_the_gpu_kernel_keeps(rule: dict[str, Any], kept: list[int]) -> None:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert sample_twin.kept(TIED, **(defaults | rule)).nonzero().flatten().tolist() == kept


def test_an_impossible_token_is_not_drawn_at_the_edge_of_the_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    row = torch.tensor([[-math.inf, 1.0, -math.inf, 0.0, -math.inf]])
    for number, token in ((0.0, 1), (math.nextafter(1.0, 0.0), 3)):
        monkeypatch.setattr(sampler, "uniform", lambda seed, position, number=number: number)
        assert sample(row.clone(), [sequence(temperature=1.0)])[0][0] == token


def test_a_row_does_not_know_its_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 64)
    mates = [sequence(position=3 + index, seed=index, temperature=1.0, top_p=0.9) for index in range(5)]
    together = [token for token, _ in sample(logits.clone(), mates)]
    alone = [sample(logits[index:index + 1].clone(), [mates[index]])[0][0] for index in range(5)]
    assert together == alone


def test_end_tokens_cannot_be_chosen_below_min_tokens() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    early = sequence(position=1, stop_ids=frozenset({1}), min_tokens=2, logprobs=1)
    token, report = sample(logits.clone(), [early])[0]
    assert token == 2
    assert report is not None
    assert list(report.top) == [1]  # the model's own preference is reported as it is
    late = sequence(position=3, stop_ids=frozenset({1}), min_tokens=2)
    assert sample(logits.clone(), [late])[0][0] == 1


def test_logprobs_are_natural_and_before_temperature() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    table = torch.log_softmax(logits[0], -1)
    token, report = sample(logits.clone(), [sequence(temperature=0.7, logprobs=2, top_k=1)])[0]
    assert token == 2
    assert report is not None
    assert report.logprob == pytest.approx(float(table[2]))
    assert report.top == pytest.approx({2: float(table[2]), 1: float(table[1])})
    assert sample(logits, [sequence(logprobs=0)])[0][1].top == {}


def test_penalties_and_bias_are_what_they_say() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0, 0.0]])
    its = sequence(position=1, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0,
                   logit_bias={3: 1.0})
    its.tokens = [0, 1, 1, 2]
    its.counts = {1: 2, 2: 1}
    row = logits[0].clone()
    assert adjust(row, its) is None
    # repetition on prompt and output, presence and frequency on output only, bias last
    assert row.tolist() == pytest.approx([1.0, 0.75 - 0.5 - 0.5, -2.0 - 0.5 - 0.25, 1.0])


def test_min_p_leaves_out_what_is_less_probable_than_its_share_of_the_best() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert np.abs(draws(logits, 1500, temperature=1.0, min_p=0.5) - [5 / 8, 3 / 8, 0, 0]).max() < 0.05
    assert draws(logits, 100, temperature=1.0, min_p=1.0).tolist() == [1, 0, 0, 0]


def test_a_row_that_is_not_finite_is_its_own_fault() -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, torch.nan], [3.0, 1.0]])
    (first, _), (fault, report), (last, _) = sample(logits, [sequence(), sequence(logprobs=1), sequence()])
    assert (first, last, report) == (1, 0, None)
    assert isinstance(fault, Fault)
    assert "not finite" in fault.message


def test_reported_log_probabilities_are_the_models_own() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    [(token, report)] = sample(logits.clone(), [sequence(logprobs=1, logit_bias={2: 50.0})])
    assert token == 2
    assert report is not None
    assert report.logprob == pytest.approx(float(torch.log_softmax(logits[0], -1)[2]))
    assert list(report.top) == [0]


def test_derived_seeds_are_the_requests_own_first_and_then_differ() -> None:
    seeds = [seed_of(41, index) for index in range(50)]
    assert seeds[0] == 41
    assert len(set(seeds)) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_restrictions_that_leave_nothing_are_the_requests_own_fault() -> None:
    row = torch.tensor([[-math.inf, 2.0, -math.inf]])
    [(fault, _), (token, _)] = sample(row.repeat(2, 1), [sequence(stop_ids=frozenset({1}), min_tokens=5), sequence()])
    assert isinstance(fault, Fault)
    assert fault.message == ("the request forbids every token: min_tokens leave none that the model has at token 1 of "
                             "the answer")
    assert token == 1
