"""From logits to tokens: greedy, temperature, top-k, top-p; log-probabilities; reproducible by (seed, position).

The random number of a token is a function of the sequence's seed and the token's position alone (one draw of a
counter-based Philox generator), so a seeded request gives the same tokens in any batch, after any preemption.

A token is drawn by inverting the cumulative distribution over candidates in descending order of probability. top-k
keeps the k most probable; top-p the shortest prefix whose probability reaches p, of what top-k left. Reported
log-probabilities are the model's own: natural, before temperature and truncation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Ordered

import numpy as np
import torch

from engines.request import TokenLogprob
from engines.runtime.sequence import Sequence

#: Candidates that top-p looks at before it sorts the whole vocabulary.
_FIRST_CANDIDATES = 256


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of (seed, position)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def sample(logits: torch.Tensor, sequences: Ordered[Sequence]) -> list[tuple[int, TokenLogprob | None]]:
    """Choose the next token of each sequence from its row of logits float32 [n, vocabulary]."""
    reports = [_log_probabilities(row, sequence) for row, sequence in zip(logits, sequences, strict=True)]
    for row, sequence in zip(logits, sequences, strict=True):
        if sequence.num_generated < sequence.params.min_tokens and sequence.stop_ids:
            row[list(sequence.stop_ids)] = -math.inf
    tokens: list[int] = logits.argmax(-1).tolist()
    for index, sequence in enumerate(sequences):
        if sequence.params.temperature > 0.0:
            tokens[index] = _draw(logits[index], sequence)
    return [(token, None if report is None else _reported(report, token, sequence.params.logprobs or 0))
            for token, report, sequence in zip(tokens, reports, sequences, strict=True)]


def _log_probabilities(row: torch.Tensor, sequence: Sequence) -> torch.Tensor | None:
    return None if sequence.params.logprobs is None else torch.log_softmax(row, -1)


def _reported(report: torch.Tensor, token: int, count: int) -> TokenLogprob:
    top: dict[int, float] = {}
    if count:
        best = torch.topk(report, min(count, report.numel()))
        top = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token_id=token, logprob=float(report[token]), top=top)


def _draw(row: torch.Tensor, sequence: Sequence) -> int:
    params = sequence.params
    probabilities = torch.softmax((row / params.temperature).double(), -1)
    values, ids = _candidates(probabilities, params.top_k, params.top_p)
    cumulative = values.cumsum(0)
    target = uniform(sequence.seed, len(sequence.tokens)) * float(cumulative[-1])
    place = int(torch.searchsorted(cumulative, torch.tensor(target, dtype=torch.float64), right=True))
    return int(ids[min(place, ids.numel() - 1)])


def _candidates(probabilities: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities, ids) that may be drawn, most probable first."""
    vocabulary = probabilities.numel()
    if top_k == 0 and top_p < 1.0:
        few = torch.topk(probabilities, min(_FIRST_CANDIDATES, vocabulary))
        if float(few.values.sum()) >= top_p:
            return _top_p(few.values, few.indices, top_p, 1.0)
    kept = torch.topk(probabilities, min(top_k, vocabulary) if top_k else vocabulary)
    return _top_p(kept.values, kept.indices, top_p, float(kept.values.sum()))


def _top_p(values: torch.Tensor, ids: torch.Tensor, top_p: float, total: float
           ) -> tuple[torch.Tensor, torch.Tensor]:
    """The shortest prefix that holds ``top_p`` of ``total``; the most probable one is always in it."""
    if top_p >= 1.0:
        return values, ids
    before = values.cumsum(0) - values
    count = max(1, int((before < top_p * total).sum()))
    return values[:count], ids[:count]
