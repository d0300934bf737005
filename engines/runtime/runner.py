"""Runner: one step of an engine. Batch in; chosen tokens and prompt scores out.

The output layer is the widest there is, so hidden rows pass through it at most ``HEAD_ROWS`` at a time: scoring a
prompt of n tokens never holds n x vocabulary logits.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any

import torch

from engines.request import PromptScore, TokenLogprob
from engines.runtime.batch import HEAD_ROWS, make_batch
from engines.runtime.choices import Backend, Part, score_step
from engines.runtime.choices import Choices as Question
from engines.runtime.sampler import Fault, sample
from engines.runtime.scheduler import Chunk
from engines.runtime.scores import score_rows
from engines.runtime.sequence import Sequence

Choices = list[tuple[Sequence, int | Fault, TokenLogprob | None]]


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that is finished when its launch returns."""

    choices: Choices

    def result(self) -> Choices:
        return self.choices


class CpuRunner:
    """Runs chunks on a CPU backend, one step at a time."""

    lookahead = 0
    adjusts_logits = True

    def __init__(self, backend: Backend, block_size: int) -> None:
        self._backend = backend
        self._block_size = block_size

    def parts(self, chunks: Ordered[Chunk]) -> list[Ordered[Chunk]]:
        """A step is one launch."""
        return [chunks]

    @torch.inference_mode()
    def launch(self, chunks: Ordered[Chunk]) -> Computed:
        """Compute the chunks; fills the scores of scoring sequences and returns the next token of the others.

        ``Sequence.computed`` is advanced here.
        """
        with self._backend.stepping():
            return self._launch(chunks)

    def _launch(self, chunks: Ordered[Chunk]) -> Computed:
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
        return Computed(self._sample(samplers, hidden, sampler_rows, context))

    @torch.inference_mode()
    def score_choices(self, questions: Ordered[Question], parts: Ordered[Ordered[Part]]) -> list[list[PromptScore]]:
        """One step over whole questions; see ``choices``."""
        with self._backend.stepping():
            return score_step(self._backend, questions, parts, self._block_size)

    def _sample(self, sequences: list[Sequence], hidden: torch.Tensor, rows: list[int], context: Any
                ) -> Choices:
        if not sequences:
            return []
        wanted = hidden if len(rows) == hidden.shape[0] else hidden[rows]
        results: Choices = []
        for first in range(0, len(sequences), HEAD_ROWS):
            part = sequences[first:first + HEAD_ROWS]
            logits = self._backend.head(wanted[first:first + HEAD_ROWS], context)
            results += [(sequence, *choice) for sequence, choice in zip(part, sample(logits, part), strict=True)]
        return results

    def _score(self, sequence: Sequence, hidden: torch.Tensor, context: Any) -> None:
        """Row i of the chunk predicts token computed + i + 1; the prompt's last row predicts nothing."""
        assert sequence.score is not None
        first = sequence.computed
        last = min(first + hidden.shape[0], len(sequence.tokens) - 1)
        for start in range(first, last, HEAD_ROWS):
            stop = min(start + HEAD_ROWS, last)
            logits = self._backend.head(hidden[start - first:stop - first], context)
            targets = torch.tensor(sequence.tokens[start + 1:stop + 1])
            score_rows(logits, targets, sequence.score, start)
