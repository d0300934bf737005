"""Sampling: exact rules, exact distribution, independence of batch mates, ties, faults."""

from __future__ import annotations

import pytest
import torch
from chi_square import chi_square_p

from engines.kernels import sample, sample_twin
from engines.kernels.impl import KernelConfig

CONFIG = KernelConfig.of("two_pass", PART=32, WARPS2=4)


def rows_of(m, device, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, positions=None):
    def full(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(m).contiguous().to(device)

    return sample.SamplingRows(full(temperature, torch.float32), full(top_k, torch.int32), full(top_p, torch.float32),
                               full(min_p, torch.float32), full(torch.arange(m) if seeds is None else seeds,
                                                                torch.int64),
                               full(0 if positions is None else positions, torch.int64))


def run(logits, rows, config=CONFIG, twin=False):
    m = logits.shape[0]
    tokens = torch.full((m,), -7, dtype=torch.int64, device=logits.device)
    logprobs = torch.full((m,), 99.0, device=logits.device)
    if twin:
        sample.twin(logits, rows, tokens, logprobs)
    else:
        work = sample.workspace(m, logits.shape[1], config, logits.device)
        work[0].fill_(float("nan"))
        sample.launch(logits, rows, tokens, logprobs, work, config)
    return tokens.cpu(), logprobs.cpu()


RULES = [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 6, "top_p": 0.7},
         {"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02}]


@pytest.mark.parametrize("vocab", [5, 100])
def test_same_draws_as_the_twin(device, vocab):
    torch.manual_seed(vocab)
    logits = torch.randn(2 * len(RULES), vocab, device=device) * 2
    keys = {name: [rule.get(name, default) for rule in RULES for _ in range(2)]
            for name, default in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))}
    rows = rows_of(len(logits), device, **keys, seeds=torch.arange(len(logits)) * 7919 + 2**40,
                   positions=torch.arange(len(logits)))
    tokens, logprobs = run(logits, rows)
    wanted, wanted_logprobs = run(logits, rows, twin=True)
    assert tokens.tolist() == wanted.tolist()
    assert torch.allclose(logprobs, wanted_logprobs, atol=1e-5)
    for i, token in enumerate(tokens.tolist()):
        rule = {name: values[i] for name, values in keys.items()}
        assert sample_twin.kept(logits[i], **rule)[token]


def test_philox_is_the_published_generator():
    """Known answers of Philox4x32-10 (Random123's kat_vectors: all zeros)."""
    words = sample_twin.philox(0, torch.zeros(1, dtype=torch.long), 0, 0)[0].tolist()
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("twin", [False, True], ids=["kernel", "twin"])
@pytest.mark.parametrize("rule", [{}, {"top_p": 0.75}, {"top_k": 4}, {"top_k": 6, "top_p": 0.8}, {"temperature": 0.6}],
                         ids=str)
def test_distribution(device, rule, twin):
    """Chi-square against the exact distribution, top-p's boundary lying inside a run of ties. The interpreter takes
    some 50 ms a row, so there the kernel's 12 draws must equal the twin's, whose distribution is tested."""
    row = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.0, 2.0, float("-inf"), 0.0])
    draws = 400 if twin else 60000 if device.type == "cuda" else 12
    logits = row.expand(draws, -1).contiguous().to(device if not twin else "cpu")
    rows = rows_of(draws, logits.device, **rule, positions=torch.arange(draws) % 11)
    tokens, _ = run(logits, rows, twin=twin)
    if draws == 12:
        assert tokens.tolist() == run(logits, rows, twin=True)[0].tolist()
        return
    keys = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | rule
    mask = sample_twin.kept(row, **keys)
    wanted = torch.softmax(torch.where(mask, row, float("-inf")).double() / keys["temperature"], 0)
    assert chi_square_p(torch.bincount(tokens, minlength=12), wanted) > 1e-4


def test_top_p_keeps_ties_together():
    row = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0])
    assert sample_twin.kept(row, 1.0, 0, 0.75, 0.0).tolist() == [True, True, True, True, False]
    assert sample_twin.kept(row, 1.0, 2, 1.0, 0.0).tolist() == [True, True, True, True, False]
    assert sample_twin.kept(row, 1.0, 0, 0.5, 0.0).tolist() == [True, False, False, False, False]


def test_twin_distribution_is_tight():
    """4,000 draws of the oracle itself."""
    row = torch.tensor([1.5, 1.0, 1.0, 0.0, -2.0])
    score = torch.stack([row - torch.log(sample_twin.exponential(seed, 3, 0, 5, row.device)) for seed in range(4000)])
    assert chi_square_p(torch.bincount(score.argmax(1), minlength=5), torch.softmax(row.double(), 0)) > 1e-4


def test_greedy_takes_the_lowest_of_ties_and_ignores_limits(device):
    logits = torch.zeros(2, 100, device=device)
    logits[0, [33, 70]] = 5.0
    tokens, logprobs = run(logits, rows_of(2, device, temperature=0.0, top_k=3, top_p=0.5, min_p=0.5))
    assert tokens.tolist() == [33, 0]
    assert torch.allclose(logprobs, torch.log_softmax(logits.cpu(), 1)[[0, 1], [33, 0]])


def test_a_row_does_not_depend_on_batch_or_part(device):
    torch.manual_seed(0)
    logits = torch.randn(6, 100, device=device)
    seeds = torch.tensor([1, 2, 3, 4, 5, 6])
    all_rows, _ = run(logits, rows_of(6, device, top_p=0.8, seeds=seeds))
    for config in (CONFIG, KernelConfig.of("two_pass", PART=128, WARPS2=2)):
        for i in (0, 5):
            one, _ = run(logits[i : i + 1], rows_of(1, device, top_p=0.8, seeds=seeds[i : i + 1]), config)
            assert one[0] == all_rows[i]
    other, _ = run(logits, rows_of(6, device, top_p=0.8, seeds=seeds, positions=1))
    assert other.tolist() != all_rows.tolist()


def test_faults_are_seen(device):
    logits = torch.zeros(4, 40, device=device)
    logits[0, 7] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    for rule in ({}, {"top_p": 0.5}, {"temperature": 0.0}):
        tokens, logprobs = run(logits, rows_of(4, device, **rule))
        assert tokens[:3].tolist() == [-1, -1, -1], rule
        assert logprobs[:3].isnan().all()
        assert tokens[3] >= 0


def test_wrong_rows_are_errors(device):
    logits = torch.zeros(2, 40, device=device)
    rows = rows_of(3, device)
    with pytest.raises(ValueError, match="temperature"):
        run(logits, rows)
