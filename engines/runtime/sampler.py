"""From logits to tokens: penalties, bias, grammar, temperature, top-k, top-p, min-p; reproducible by (seed, position).

The random number of a token is a function of the sequence's seed and the token's position alone (one draw of a
counter-based Philox generator), so a seeded request gives the same tokens in any batch, after any preemption.

A token is drawn by inverting the cumulative distribution over candidates in descending order of probability. top-k
keeps the k most probable; top-p the shortest prefix whose probability reaches p, of what top-k left; min-p those of
at least that share of the most probable one's probability. Reported log-probabilities are the model's own: natural,
before anything changes the logits.

A row that is not finite, or whose grammar stops, is a fault of that sequence alone: it is reported as a ``Fault`` in
the token's place, and the other rows go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import torch

from engines.request import TokenLogprob
from engines.runtime.grammar import GrammarError
from engines.runtime.sequence import Sequence

#: Candidates that top-p looks at before it sorts the whole vocabulary.
_FIRST_CANDIDATES = 256


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of (seed, position)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a row got no token."""

    message: str


Choice = tuple[int | Fault, TokenLogprob | None]


def sample(logits: torch.Tensor, sequences: Ordered[Sequence]) -> list[Choice]:
    """Choose the next token of each sequence from its row of logits float32 [n, vocabulary]."""
    reports = [_log_probabilities(row, sequence) for row, sequence in zip(logits, sequences, strict=True)]
    faults = {index: Fault(f"the logits at position {len(sequences[index].tokens)} are not finite")
              for index in (~torch.isfinite(logits.amax(-1))).nonzero().flatten().tolist()}
    for index, (row, sequence) in enumerate(zip(logits, sequences, strict=True)):
        if index not in faults and (fault := adjust(row, sequence)):
            faults[index] = fault
    tokens: list[int] = logits.argmax(-1).tolist()
    for index, sequence in enumerate(sequences):
        if sequence.params.temperature > 0.0 and index not in faults:
            tokens[index] = _draw(logits[index], sequence)
    found: list[Choice] = []
    for index, (token, report, sequence) in enumerate(zip(tokens, reports, sequences, strict=True)):
        if index in faults:
            found.append((faults[index], None))
        else:
            found.append((token, None if report is None else _reported(report, token, sequence.params.logprobs or 0)))
    return found


def adjust(row: torch.Tensor, sequence: Sequence) -> Fault | None:
    """Change a row of logits [vocabulary] in place as the sequence's parameters ask, before temperature."""
    params = sequence.params
    if params.penalised:
        _penalise(row, sequence)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), device=row.device, dtype=row.dtype)
    if sequence.matcher is not None:
        try:
            row[torch.from_numpy(~sequence.matcher.allowed()).to(row.device)] = -math.inf
        except GrammarError as error:
            return Fault(error.message)
        if not bool(torch.isfinite(row.amax())):
            return Fault("the grammar allows no token that the model has")
    if sequence.num_generated < params.min_tokens and sequence.stop_ids:
        row[list(sequence.stop_ids)] = -math.inf
    return None


def adjusts(sequence: Sequence) -> bool:
    """Whether ``adjust`` changes anything for the sequence's next token."""
    params = sequence.params
    return (params.penalised or bool(params.logit_bias) or sequence.matcher is not None
            or (sequence.num_generated < params.min_tokens and bool(sequence.stop_ids)))


def _penalise(row: torch.Tensor, sequence: Sequence) -> None:
    params = sequence.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.tokens)), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if sequence.counts and (params.presence_penalty or params.frequency_penalty):
        ids = torch.tensor(list(sequence.counts), device=row.device)
        counts = torch.tensor(list(sequence.counts.values()), device=row.device, dtype=row.dtype)
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts


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
    if params.min_p > 0.0:
        count = max(1, int((values >= params.min_p * values[0]).sum()))
        values, ids = values[:count], ids[:count]
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
