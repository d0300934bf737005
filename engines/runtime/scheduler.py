"""Which tokens the next step computes: in-flight batching, chunked prefill, priorities, preemption by recompute.

A step is at most ``max_num_tokens`` tokens of at most ``max_batch_size`` sequences. Decoding sequences come first, one
token each; what is left of the budget goes to prefills.

**Order.** ``Sequence.rank``: priority (lower first), then age. The best-ranked runs first, the worst gives way.

**Fairness among prefills.** The best-ranked prefill gets half of the budget for prefills as long as others want some;
the other half goes to the shortest of the rest, waiting ones included. So a prompt of 10,000 tokens never stops a short
one behind it, and short ones never stop the long one.

**Admission by full footprint.** A waiting sequence starts only when all the tokens it has now fit the available blocks,
with one block to spare for each running sequence; so a preempted one does not come back only to be preempted again. (A
prefill owns all its blocks from the start; only decodes grow.) One that does not fit yet may be passed by smaller ones,
``MAX_PASSED`` times; then everybody waits for it. A preempted one is never passed.

**Continuations of one prompt.** The first one computes it; the others (``Sequence.follows``) wait until its blocks are
kept, and find them: of n continuations of a prompt, all but the tokens behind its last full block are computed once.

**Blocks run out.** The worst-ranked running sequence gives its blocks back and waits; it is recomputed later (its full
blocks stay in the prefix cache as long as nobody needs them). Sequences are preempted for better-ranked ones only, and
limits guarantee that any one sequence's full length fits the pool alone: so the best always advances, and every step
makes progress. A waiting sequence of better priority also takes the place of the worst running one.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from engines.errors import EngineError
from engines.runtime.blocks import BlockPool, Kept, block_key
from engines.runtime.sequence import Sequence

#: How often a waiting sequence may be passed by others.
MAX_PASSED = 64
#: How many waiting sequences that do not fit are looked past in one step.
MAX_LOOKED_PAST = 16
_rank = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Chunk:
    """``count`` tokens of ``sequence``, from ``sequence.computed`` on."""

    sequence: Sequence
    count: int


class Scheduler:
    """Owns the order of sequences and, through the pool, their blocks. ``longest``: the most tokens of one."""

    __slots__ = ("hit_tokens", "looked_up_tokens", "max_batch_size", "max_num_tokens", "max_step_blocks", "pool",
                 "preemptions", "running", "waiting")

    def __init__(self, pool: BlockPool, max_batch_size: int, max_num_tokens: int, longest: int | None = None) -> None:
        self.pool = pool
        self.max_batch_size, self.max_num_tokens = max_batch_size, max_num_tokens
        #: Blocks that sequences admitted in one step may hold together (a step's record on a GPU has that much room).
        self.max_step_blocks = (pool.blocks_for(max_num_tokens) + max_batch_size
                                + (pool.num_blocks if longest is None else pool.blocks_for(longest)))
        #: Both in order of rank.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.looked_up_tokens = self.hit_tokens = 0

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=_rank)

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
        self._admit()
        chunks = self._decodes()
        chunks += self._prefills(self.max_num_tokens - len(chunks))
        if not chunks and not any(sequence.unknown for sequence in self):
            if self.idle:
                return []
            raise EngineError("no sequence can advance", "This is a bug in the scheduler; report it.")
        return sorted(chunks, key=lambda chunk: chunk.count > 1)

    def _ready(self, sequence: Sequence) -> bool:
        """Whether the next step may compute its one remaining token."""
        return sequence.remaining == 1 and not sequence.blocked

    def _decodes(self) -> list[Chunk]:
        chosen: list[Sequence] = []
        for sequence in list(self.running):
            if len(chosen) == self.max_num_tokens:
                break
            if self._ready(sequence) and sequence.table and self._make_room(sequence, sequence.computed + 1):
                chosen.append(sequence)
        return [Chunk(sequence, 1) for sequence in chosen if sequence.table]  # (a preempted one has no blocks)

    def _prefills(self, budget: int) -> list[Chunk]:
        """Chunks of running sequences with more than one token to go. They own their blocks already."""
        wanting = [sequence for sequence in self.running if sequence.remaining > 1]
        if not wanting or budget <= 0:
            return []
        first, *others = wanting
        share = min(first.remaining, (budget + 1) // 2 if others else budget)
        grants = {first: share}
        left = budget - share
        for sequence in sorted(others, key=lambda sequence: (sequence.remaining, sequence.rank)):
            grants[sequence] = min(sequence.remaining, left)
            left -= grants[sequence]
        grants[first] += min(left, first.remaining - share)
        return [Chunk(sequence, count) for sequence, count in grants.items() if count]

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for ``tokens`` tokens, preempting the worst-ranked; False when the sequence itself was preempted."""
        while not self.pool.grow(sequence.table, tokens):
            worst = self.running[-1]
            self._preempt(worst)
            if worst is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.table)
        sequence.computed = sequence.kept = 0

    def _admit(self) -> None:
        """Start waiting sequences in order of rank, as far as batch, budget and blocks go."""
        budget = self.max_num_tokens - sum(self._ready(sequence) for sequence in self.running)
        given = 0
        passed: list[Sequence] = []
        for sequence in list(self.waiting):
            if budget <= 0 or sequence.unknown:  # preempted with a token under way: what to recompute is not known yet
                break
            if sequence.follows and self._can_share(sequence):
                continue
            need = self.pool.blocks_for(len(sequence.tokens))
            if given and given + need > self.max_step_blocks:
                break
            full = len(self.running) >= self.max_batch_size
            if len(passed) > MAX_LOOKED_PAST or (full and not self._make_way(sequence)):
                break
            if self._start(sequence) or (self._make_way(sequence) and self._start(sequence)):
                given += need
                budget -= 1
                for other in passed:
                    other.passed += 1
            elif sequence.preemptions or sequence.passed >= MAX_PASSED:
                break
            else:
                passed.append(sequence)

    def _can_share(self, sequence: Sequence) -> bool:
        """Whether its leader will leave blocks that it can use."""
        return (self.pool.reuse and sequence.keys is not None
                and (sequence.prompt_len - 1) // self.pool.block_size > 0)

    def _make_way(self, sequence: Sequence) -> bool:
        """Preempt running sequences of worse priority until batch and blocks have room for ``sequence``.

        False, and nothing done, when all of them together would not make it fit.
        """
        pool = self.pool
        lower = [other for other in self.running if other.priority > sequence.priority]
        own = pool.blocks_for(len(sequence.tokens))
        gained = sum(pool.owners[block] == 1 for other in lower for block in other.table)
        if not lower or pool.available + gained < own + len(self.running):
            return False
        while lower and (len(self.running) >= self.max_batch_size or pool.available < own + len(self.running)):
            self._preempt(lower.pop())
        return True

    def _start(self, sequence: Sequence) -> bool:
        """Give a waiting sequence all its blocks, kept ones first. False, and nothing taken, when it does not fit."""
        pool, tokens = self.pool, sequence.tokens
        found = self._find(sequence)
        need = pool.blocks_for(len(tokens)) - len(found)
        if pool.available - pool.idle_among(found) - need < len(self.running):
            return False
        pool.share(sequence.table, found)
        if not pool.grow(sequence.table, len(tokens)):
            raise EngineError("blocks that were available are not", "This is a bug in the scheduler; report it.")
        sequence.kept = len(found)
        sequence.computed = len(found) * pool.block_size
        if sequence.cached_tokens is None:
            sequence.started_at = time.perf_counter()
            sequence.cached_tokens = sequence.computed
            if sequence.keys is not None:
                self.looked_up_tokens += len(tokens)
                self.hit_tokens += sequence.computed
        sequence.leader = None
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=_rank)
        return True

    def _find(self, sequence: Sequence) -> list[int]:
        """Kept blocks that begin like the sequence; at least its last token is left to compute."""
        if sequence.keys is None or not self.pool.reuse:
            return []
        count = (len(sequence.tokens) - 1) // self.pool.block_size
        self._extend_keys(sequence, count)
        return self.pool.find(sequence.keys[:count], sequence.root, sequence.tokens)

    def _extend_keys(self, sequence: Sequence, count: int) -> None:
        assert sequence.keys is not None
        size = self.pool.block_size
        for index in range(len(sequence.keys), count):
            parent = sequence.keys[-1] if sequence.keys else sequence.root
            sequence.keys.append(block_key(parent, sequence.tokens[index * size:(index + 1) * size]))

    def remember(self, sequence: Sequence) -> None:
        """Keep the blocks that a launched step has filled with known tokens."""
        size = self.pool.block_size
        full = min(sequence.computed, sequence.known) // size
        if sequence.keys is None or full <= sequence.kept or not self.pool.reuse:
            return
        self._extend_keys(sequence, full)
        for index in range(sequence.kept, full):
            parent = sequence.keys[index - 1] if index else sequence.root
            self.pool.keep(sequence.table[index], Kept(sequence.keys[index], parent, tuple(
                sequence.tokens[index * size:(index + 1) * size])))
        sequence.kept = full

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence and take its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence)

    def check(self) -> None:
        """Every block is free, cached, or owned as often as it says; nothing that waits owns any."""
        self.pool.check(sequence.table for sequence in self)
        if any(sequence.table for sequence in self.waiting):
            raise EngineError("a waiting sequence owns KV blocks", "This is a bug in the scheduler; report it.")
