"""From logits to tokens: penalties, bias, grammar, temperature, top-k, top-p, min-p; reproducible by (seed, position).

The random number of a token is a function of the sequence's seed and the token's position alone (one draw of a
counter-based Philox generator), so a seeded request gives the same tokens in any batch, after any preemption.

A token is drawn by inverting the cumulative distribution over the kept tokens, in the order of their ids. Kept are

    top-k   tokens of which fewer than k are more probable
    top-p   of those, tokens whose more probable ones hold less than p of their probability
    min-p   of those, tokens of at least that share of the most probable one's probability

so each rule keeps everything from a threshold on, and ties with the last one kept stay: which of them would go is no
accident of a sort. (``kernels/sample`` has the same rules and another random stream.) Reported log-probabilities are
the model's own: natural, before anything changes the logits.

A row that is not finite, or whose grammar stops, is a fault of that sequence alone: it is reported as a ``Fault`` in
the token's place, and the other rows go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import torch

from engines.request import CONFLICT, SamplingParams, TokenLogprob
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
    masks = _masks(sequence)
    if sequence.matcher is not None:
        try:
            row[torch.from_numpy(~sequence.matcher.allowed()).to(row.device)] = -math.inf
        except GrammarError as error:
            return Fault(error.message)
    if sequence.bad_words is not None:
        row[torch.from_numpy(sequence.bad_words.banned(sequence.generated)).to(row.device)] = -math.inf
    if sequence.num_generated < params.min_tokens and sequence.stop_ids:
        row[list(sequence.stop_ids)] = -math.inf
    # On a GPU asking means waiting for the device. Grammars and bad words wait anyway; for min_tokens alone the
    # kernel's own check of the row must do.
    asked = row.device.type == "cpu" or sequence.params.stepwise
    if masks and asked and not bool(torch.isfinite(row.amax())):
        return Fault(f"{CONFLICT}{' and '.join(masks)} {'together ' * (len(masks) > 1)}leave none that the model has "
                     f"at token {sequence.num_generated + 1} of the answer")
    return None


def _masks(sequence: Sequence) -> list[str]:
    """What forbids tokens of the sequence's next row."""
    early = sequence.num_generated < sequence.params.min_tokens and bool(sequence.stop_ids)
    return [name for name, given in (("the grammar", sequence.matcher is not None),
                                     ("bad_words", sequence.bad_words is not None), ("min_tokens", early)) if given]


def adjusts(sequence: Sequence) -> bool:
    """Whether ``adjust`` changes anything for the sequence's next token."""
    return sequence.params.penalised or bool(sequence.params.logit_bias) or bool(_masks(sequence))


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
    probabilities = torch.softmax((row / params.heat).double(), -1)
    least = _threshold(probabilities, params)
    ids = None
    if least > 0.0:
        ids = (probabilities >= least).nonzero().squeeze(-1)
        probabilities = probabilities[ids]
    cumulative = probabilities.cumsum(0)
    total = float(cumulative[-1])
    # Below the total, so that the place found is always one where the sum grows: a token of probability above 0.
    target = min(uniform(sequence.seed, len(sequence.tokens)) * total, math.nextafter(total, 0.0))
    place = int(torch.searchsorted(cumulative, torch.tensor(target, dtype=torch.float64), right=True))
    return place if ids is None else int(ids[place])


def _threshold(probabilities: torch.Tensor, params: SamplingParams) -> float:
    """The least probability that is kept; 0 when all are."""
    least = 0.0
    if 0 < params.top_k < probabilities.numel():
        least = float(torch.topk(probabilities, params.top_k).values[-1])
    if params.top_p < 1.0:
        least = max(least, _top_p(probabilities, params.top_p, least))
    if params.min_p > 0.0:
        least = max(least, params.min_p * float(probabilities.max()))
    return least


def _top_p(probabilities: torch.Tensor, top_p: float, least: float) -> float:
    """The probability of the last token that top-p keeps among those of at least ``least``.

    In descending order tokens are kept as long as those before hold less than ``top_p``: so in a run of ties the first
    decides, and the last one kept has its probability.
    """
    kept = probabilities if least == 0.0 else probabilities[probabilities >= least]
    limit = top_p * float(kept.sum())
    values = torch.topk(kept, min(_FIRST_CANDIDATES, kept.numel())).values
    if float(values.sum()) < limit:
        values = kept.sort(descending=True).values
    before = values.cumsum(0) - values
    return float(values[max(1, int((before < limit).sum())) - 1])
