"""Scoring continuations that share a context: the context is computed once, not once a continuation.

A multiple-choice question is one context and several continuations; as separate prompts the context is computed for
each of them. Here all of a question is one step. Within a layer every row's key and value is in the cache before any
row attends, so later continuations read the context's blocks in the very step that fills them::

    first       | c0 ... c15 | c16 c17 c18 a0        blocks of its own: the context's, one of them full
    second        c0 ... c15 | c16 c17 c18 b0 b1     table: the first one's full block, then a block of its own
                                                     (computed rows are those behind the last |; of the first, all)

Only full blocks can be shared, so later continuations compute the context's tail again (less than a block). A
continuation's last token predicts nothing and is not computed; the context's last row predicts every continuation's
first token; and only rows that predict something pass through the output layer, which is the widest. A question of 100
tokens with four answers of 6 takes 132 rows instead of 424, and 21 through the output layer; one that is shorter than a
block takes no more rows than its prompts apart.

No option of attention is needed for it: to a backend these are sequences like others, some of whose blocks lie in two
tables. They are given back after the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engines.request import PromptScore
from engines.runtime.batch import HEAD_ROWS, Batch
from engines.runtime.blocks import BlockPool


class Backend(Protocol):
    """What runs a Batch: ``cpu.CpuBackend`` and ``native.NativeBackend``. A context is a backend's own."""

    def stepping(self) -> AbstractContextManager[None]: ...

    def context(self, batch: Batch) -> Any: ...

    def body(self, context: Any) -> torch.Tensor: ...

    def head(self, rows: torch.Tensor, context: Any) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Choices:
    """A context of at least one token and its continuations, each of at least one."""

    context: Ordered[int]
    continuations: Ordered[Ordered[int]]

    def tail(self, block_size: int) -> int:
        """Tokens of the context behind its last full block."""
        return len(self.context) % block_size

    @property
    def longer(self) -> list[Ordered[int]]:
        """Continuations with rows of their own: two tokens or more."""
        return [one for one in self.continuations if len(one) > 1]

    def rows(self, block_size: int) -> int:
        """Tokens that are computed."""
        again = self.tail(block_size) * max(0, len(self.longer) - 1)
        return len(self.context) + again + sum(len(one) - 1 for one in self.longer)


@dataclass(slots=True)
class Part:
    """One sequence of the step: rows ``begin``... of ``tokens`` are computed; hidden rows from ``wanted`` on are read.

    ``own`` are its blocks, behind the first ``shared`` of the context's.
    """

    tokens: list[int]
    begin: int
    wanted: int
    shared: list[int]
    own: list[int]


def parts_of(question: Choices, pool: BlockPool) -> list[Part] | None:
    """The context with the first longer continuation, then each other one, with blocks; None (and none taken) when
    there are too few."""
    context, longer = list(question.context), question.longer
    full = len(context) - question.tail(pool.block_size)
    parts = [Part([*context, *(longer[0][:-1] if longer else ())], 0, len(context) - 1, [], [])]
    parts += [Part([*context, *one[:-1]], full, len(context), [], []) for one in longer[1:]]
    for part in parts:
        if not pool.grow(part.own, len(part.tokens) - part.begin):
            release(parts, pool)
            return None
        part.shared = parts[0].own[:part.begin // pool.block_size]
    return parts


def take_step(questions: Ordered[Choices], sizes: Ordered[int], waiting: deque[int], budget: int, pool: BlockPool
              ) -> dict[int, list[Part]]:
    """The first waiting questions that fit a step of ``budget`` tokens, taken from ``waiting``, with their blocks."""
    step: dict[int, list[Part]] = {}
    while waiting and sizes[waiting[0]] <= budget:
        parts = parts_of(questions[waiting[0]], pool)
        if parts is None:
            break
        budget -= sizes[waiting[0]]
        step[waiting.popleft()] = parts
    return step


def release(parts: Ordered[Part], pool: BlockPool) -> None:
    for part in parts:
        pool.release(part.own)


def _batch(parts: Ordered[Part], block_size: int) -> Batch:
    """The parts one after the other; those with one row come first (they are decodes to a backend)."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    tables = [[*part.shared, *part.own] for part in parts]
    for part, table in zip(parts, tables, strict=True):
        rows += range(len(tokens) + part.wanted - part.begin, len(tokens) + len(part.tokens) - part.begin)
        tokens += part.tokens[part.begin:]
        positions += range(part.begin, len(part.tokens))
        slots += [table[at // block_size] * block_size + at % block_size for at in range(part.begin, len(part.tokens))]
    return Batch(tokens=torch.tensor(tokens), positions=torch.tensor(positions), slots=torch.tensor(slots),
                 rows=None if len(rows) == len(tokens) else torch.tensor(rows), tables=tables,
                 lengths=[len(part.tokens) for part in parts], new=[len(part.tokens) - part.begin for part in parts])


def score_step(backend: Backend, questions: Ordered[Choices], parts: Ordered[Ordered[Part]], block_size: int
               ) -> list[list[PromptScore]]:
    """One step: a PromptScore over its own tokens for each continuation of each question."""
    flat = sorted((part for each in parts for part in each), key=lambda part: len(part.tokens) - part.begin > 1)
    context = backend.context(_batch(flat, block_size))
    hidden = backend.body(context)
    first: dict[int, int] = {}
    at = 0
    for part in flat:
        first[id(part)] = at
        at += len(part.tokens) - part.wanted
    predicting = [list(rows) for question, each in zip(questions, parts, strict=True)
                  for rows in _rows(question, each, first)]
    asked = [list(one) for question in questions for one in question.continuations]
    found = iter(_scores(backend, hidden, context, predicting, asked))
    return [[next(found) for _ in question.continuations] for question in questions]


def _rows(question: Choices, parts: Ordered[Part], first: dict[int, int]) -> Iterator[list[int]]:
    """For each continuation the hidden rows that predict its tokens: the context's last, then its own but the last."""
    shared = first[id(parts[0])]
    begins = iter([shared + 1, *(first[id(part)] for part in parts[1:])])
    for one in question.continuations:
        begin = next(begins) if len(one) > 1 else 0
        yield [shared, *range(begin, begin + len(one) - 1)]


def _scores(backend: Backend, hidden: torch.Tensor, context: Any, predicting: Ordered[Ordered[int]],
            asked: Ordered[Ordered[int]]) -> list[PromptScore]:
    """Scores of the tokens ``asked``, each predicted by a row of ``hidden``; the output layer sees 128 rows at once."""
    rows, targets = (np.array([value for each in values for value in each]) for values in (predicting, asked))
    logprobs, greedy = np.empty(len(rows), np.float32), np.empty(len(rows), np.bool_)
    for start in range(0, hidden.shape[0], HEAD_ROWS):
        logits = backend.head(hidden[start:start + HEAD_ROWS], context).float()
        total, best = torch.logsumexp(logits, -1), logits.argmax(-1)
        here = np.flatnonzero((rows >= start) & (rows < start + HEAD_ROWS))
        row, target = torch.from_numpy(rows[here] - start), torch.from_numpy(targets[here])
        logprobs[here] = (logits[row, target] - total[row]).numpy()
        greedy[here] = (best[row] == target).numpy()
    ends = np.cumsum([len(one) for one in asked])[:-1]
    return [PromptScore(own, most) for own, most in zip(np.split(logprobs, ends), np.split(greedy, ends), strict=True)]
