"""Which tokens the next step computes: in-flight batching, chunked prefill, preemption by recompute.

A step is at most ``max_num_tokens`` tokens of at most ``max_batch_size`` sequences. Decoding sequences come first, one
token each, then prefill chunks in order of admission with what is left of the budget: a long prompt never stops the
others' tokens.

**Blocks run out.** The last of the running sequences gives its blocks back and waits at the front; it is recomputed
later. Only sequences behind another are preempted for it, and admission guarantees that any one sequence's full length
fits the pool alone: so the first always advances, and every step makes progress. A waiting sequence starts only when
all the tokens it has now fit the free blocks with one block to spare for each running one, so that a preempted sequence
does not come back only to be preempted again. (A prefill owns all its blocks from the start; only decodes grow.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from engines.errors import EngineError
from engines.runtime.blocks import BlockPool
from engines.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """``count`` tokens of ``sequence``, from ``sequence.computed`` on."""

    sequence: Sequence
    count: int


class Scheduler:
    """Owns the order of sequences and, through the pool, their blocks."""

    __slots__ = ("max_batch_size", "max_num_tokens", "pool", "preemptions", "running", "waiting")

    def __init__(self, pool: BlockPool, max_batch_size: int, max_num_tokens: int) -> None:
        self.pool = pool
        self.max_batch_size, self.max_num_tokens = max_batch_size, max_num_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def schedule(self) -> list[Chunk]:
        """The next step's chunks: decodes first, then prefills, each with its blocks.

        Empty only when idle, or when nothing can advance before a launched step is read.
        """
        budget = self.max_num_tokens
        chunks: list[Chunk] = []
        for sequence in sorted(self.running, key=lambda sequence: sequence.remaining > 1):
            if budget == 0 or sequence not in self.running:  # the step is full, or it was preempted by an older one
                continue
            count = min(sequence.remaining, budget)
            if count == 0:  # its last token is launched but not read
                continue
            if self._make_room(sequence, sequence.computed + count):
                chunks.append(Chunk(sequence, count))
                budget -= count
        self._admit(chunks, budget)
        if not chunks and not any(sequence.unknown for sequence in self):
            if self.idle:
                return []
            raise EngineError("no sequence can advance", "This is a bug in the scheduler; report it.")
        return sorted(chunks, key=lambda chunk: chunk.count > 1)

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for ``tokens`` tokens, preempting the youngest; False when the sequence itself was preempted."""
        while not self.pool.grow(sequence.table, tokens):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.table)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.max_batch_size:
            sequence = self.waiting[0]
            if sequence.unknown:  # preempted with a token under way: what to recompute is not known yet
                break
            spare = self.pool.free - self.pool.blocks_for(len(sequence.tokens))
            if spare < len(self.running) or not self.pool.grow(sequence.table, len(sequence.tokens)):
                break
            self.running.append(self.waiting.popleft())
            count = min(sequence.remaining, budget)
            chunks.append(Chunk(sequence, count))
            budget -= count

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence and take its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.pool.release(sequence.table)

    def check(self) -> None:
        """Every block is free or owned once; nothing that waits owns any."""
        self.pool.check(sequence.table for sequence in self)
        if any(sequence.table for sequence in self.waiting):
            raise EngineError("a waiting sequence owns KV blocks", "This is a bug in the scheduler; report it.")
