"""Batch: one step's tokens, as the runner sees them. It crosses from the scheduler to the kernels as an argument."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import torch

from engines.runtime.scheduler import Chunk

#: Hidden rows that pass through the output layer at once.
HEAD_ROWS = 128


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of all chunks, one after the other; chunks with one token come first.

    ``tokens``, ``positions`` and ``slots`` int64 [t]; ``rows`` int64 [r] are the rows whose logits are wanted (None:
    all of them, in order); ``tables``, ``lengths`` (with the new tokens) and ``new`` by sequence.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor | None
    tables: Ordered[Ordered[int]]
    lengths: Ordered[int]
    new: Ordered[int]


def make_batch(chunks: Ordered[Chunk], block_size: int) -> Batch:
    """Lay the chunks out. Wanted rows: every row of a scoring sequence, the last row of one that is fully computed."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    for chunk in chunks:
        sequence, first = chunk.sequence, len(tokens)
        span = range(sequence.computed, sequence.computed + chunk.count)
        tokens += sequence.tokens[span.start:span.stop]
        positions += span
        slots += [sequence.table[at // block_size] * block_size + at % block_size for at in span]
        if sequence.score is not None:
            rows += range(first, len(tokens))
        elif span.stop == len(sequence.tokens):
            rows.append(len(tokens) - 1)
    return Batch(tokens=torch.tensor(tokens), positions=torch.tensor(positions), slots=torch.tensor(slots),
                 rows=None if len(rows) == len(tokens) else torch.tensor(rows, dtype=torch.int64),
                 tables=[chunk.sequence.table for chunk in chunks],
                 lengths=[chunk.sequence.computed + chunk.count for chunk in chunks],
                 new=[chunk.count for chunk in chunks])
