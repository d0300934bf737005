"""Runner: one step of an engine. Batch in; chosen tokens and prompt scores out.

The output layer is the widest there is, so hidden rows pass through it at most ``HEAD_ROWS`` at a time: scoring a prompt
of n tokens never holds n x vocabulary logits.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import torch

from engines.request import TokenLogprob
from engines.runtime.batch import make_batch
from engines.runtime.cpu import CpuBackend, StepContext
from engines.runtime.sampler import sample
from engines.runtime.scheduler import Chunk
from engines.runtime.sequence import ScoreRequest, Sequence

HEAD_ROWS = 128


class Runner:
    """Runs chunks on a backend."""

    def __init__(self, backend: CpuBackend, block_size: int) -> None:
        self._backend = backend
        self._block_size = block_size

    @torch.inference_mode()
    def step(self, chunks: Ordered[Chunk]) -> list[tuple[Sequence, int, TokenLogprob | None]]:
        """Compute the chunks; fills the scores of scoring sequences and returns the next token of the others.

        ``Sequence.computed`` is advanced here.
        """
        batch = make_batch(chunks, self._block_size)
        context = self._backend.context(batch)
        hidden = self._backend.body(context)
        samplers: list[Sequence] = []
        sampler_rows: list[int] = []
        at = 0
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.score is not None:
                self._score(sequence, hidden[at:at + chunk.count], context)
                at += chunk.count
            elif sequence.computed + chunk.count == len(sequence.tokens):
                samplers.append(sequence)
                sampler_rows.append(at)
                at += 1
            sequence.computed += chunk.count
        return self._sample(samplers, hidden, sampler_rows, context)

    def _sample(self, sequences: list[Sequence], hidden: torch.Tensor, rows: list[int], context: StepContext
                ) -> list[tuple[Sequence, int, TokenLogprob | None]]:
        if not sequences:
            return []
        wanted = hidden if len(rows) == hidden.shape[0] else hidden[rows]
        results: list[tuple[Sequence, int, TokenLogprob | None]] = []
        for first in range(0, len(sequences), HEAD_ROWS):
            part = sequences[first:first + HEAD_ROWS]
            logits = self._backend.head(wanted[first:first + HEAD_ROWS], context)
            results += [(sequence, *choice) for sequence, choice in zip(part, sample(logits, part), strict=True)]
        return results

    def _score(self, sequence: Sequence, hidden: torch.Tensor, context: StepContext) -> None:
        """Row i of the chunk predicts token computed + i + 1; the prompt's last row predicts nothing."""
        assert sequence.score is not None
        first = sequence.computed
        last = min(first + hidden.shape[0], len(sequence.tokens) - 1)
        for start in range(first, last, HEAD_ROWS):
            stop = min(start + HEAD_ROWS, last)
            logits = self._backend.head(hidden[start - first:stop - first], context)
            targets = torch.tensor(sequence.tokens[start + 1:stop + 1])
            score_rows(logits, targets, sequence.score, start)


def score_rows(logits: torch.Tensor, targets: torch.Tensor, score: ScoreRequest, start: int) -> None:
    """Fill rows ``start``... of a score from logits float32 [r, vocabulary] and the tokens that followed [r]."""
    stop = start + targets.numel()
    total = torch.logsumexp(logits, -1, keepdim=True)
    chosen = logits.gather(1, targets[:, None])
    score.logprobs[start:stop] = (chosen - total).squeeze(1).numpy()
    score.greedy[start:stop] = (logits.argmax(-1) == targets).numpy()
    if score.top_ids is not None and score.top_logprobs is not None:
        best = torch.topk(logits, score.top_k, -1)
        score.top_ids[start:stop] = best.indices.numpy()
        score.top_logprobs[start:stop] = (best.values - total).numpy()
    if score.at_ids is not None and score.at_logprobs is not None:
        score.at_logprobs[start:stop] = (logits.gather(1, score.at_ids[start:stop]) - total).numpy()
