"""Blocks and scheduling without a model: ownership, budgets, preemption, progress."""

from __future__ import annotations

import numpy as np
import pytest

from engines.errors import EngineError
from engines.request import SamplingParams
from engines.runtime.blocks import BlockPool
from engines.runtime.scheduler import Scheduler
from engines.runtime.sequence import Sequence


def sequence(number: int, prompt: int, max_tokens: int) -> Sequence:
    return Sequence(number, [1] * prompt, prompt, SamplingParams(max_tokens=max_tokens), 0, frozenset())


def advance(scheduler: Scheduler) -> list[tuple[int, int]]:
    """One step as the loop makes it, without a model: every finished chunk appends a token."""
    chunks = scheduler.schedule()
    scheduler.check()
    for chunk in chunks:
        its = chunk.sequence
        assert len(its.table) * scheduler.pool.block_size >= its.computed + chunk.count
        its.computed += chunk.count
        if its.remaining == 0:
            its.tokens.append(1)
            if its.num_generated >= its.params.max_tokens:
                scheduler.finish(its)
    scheduler.check()
    return [(chunk.sequence.number, chunk.count) for chunk in chunks]


def test_pool_prefers_the_next_block_and_counts() -> None:
    pool = BlockPool(6, 4)
    a: list[int] = []
    b: list[int] = []
    assert pool.grow(a, 5)
    assert a == [0, 1]
    assert pool.grow(b, 1)
    assert pool.grow(a, 9)
    assert (a, b, pool.free, pool.used) == ([0, 1, 3], [2], 2, 4)
    assert not pool.grow(b, 100)
    assert b == [2]  # nothing taken
    pool.check([a, b])
    with pytest.raises(EngineError, match="two sequences"):
        pool.check([a, [2, 3]])
    with pytest.raises(EngineError, match="3 owned"):
        pool.check([a])
    pool.release(a)
    assert a == []
    with pytest.raises(EngineError, match="twice"):
        pool.release([0])


def test_decodes_come_before_prefills_and_the_budget_holds() -> None:
    scheduler = Scheduler(BlockPool(100, 4), max_batch_size=8, max_num_tokens=10)
    scheduler.add(sequence(0, 3, 50))
    scheduler.add(sequence(1, 25, 50))
    assert advance(scheduler) == [(0, 3), (1, 7)]
    assert advance(scheduler) == [(0, 1), (1, 9)]
    assert advance(scheduler) == [(0, 1), (1, 9)]
    assert advance(scheduler) == [(0, 1), (1, 1)]


def test_a_long_prompt_does_not_stop_others_tokens() -> None:
    scheduler = Scheduler(BlockPool(100, 4), max_batch_size=8, max_num_tokens=4)
    scheduler.add(sequence(0, 40, 1))
    scheduler.add(sequence(1, 1, 5))
    steps = [advance(scheduler) for _ in range(12)]
    first = next(index for index, step in enumerate(steps) if (1, 1) in step)
    assert all((1, 1) in step for step in steps[first:first + 2])


def test_the_youngest_gives_way_and_the_first_always_advances() -> None:
    scheduler = Scheduler(BlockPool(8, 2), max_batch_size=8, max_num_tokens=64)
    for number in range(3):
        scheduler.add(sequence(number, 3, 12))
    lengths: list[int] = []
    preempted_before = 0
    for _ in range(200):
        if scheduler.idle:
            break
        head = scheduler.running[0] if scheduler.running else None
        had = len(head.tokens) if head else 0
        advance(scheduler)
        if head is not None and scheduler.preemptions > preempted_before:
            assert len(head.tokens) > had
        preempted_before = scheduler.preemptions
        lengths.append(scheduler.pool.used)
    assert scheduler.idle
    assert scheduler.preemptions > 0
    assert scheduler.pool.free == 8


@pytest.mark.parametrize("seed", range(8))
def test_random_loads_always_finish(seed: int) -> None:
    random = np.random.default_rng(seed)
    block_size = int(random.integers(1, 6))
    longest = 40
    pool = BlockPool(-(-longest // block_size) + int(random.integers(0, 12)), block_size)
    scheduler = Scheduler(pool, int(random.integers(1, 6)), int(random.integers(1, 30)))
    waiting = [sequence(number, int(random.integers(1, 25)), int(random.integers(1, 15))) for number in range(30)]
    everything = list(waiting)
    for _ in range(20_000):
        if waiting and random.random() < 0.3:
            scheduler.add(waiting.pop())
        if scheduler.idle:
            if not waiting:
                break
            continue
        work = advance(scheduler)
        assert 0 < sum(count for _, count in work) <= scheduler.max_num_tokens
        assert len(work) <= scheduler.max_batch_size
    assert scheduler.idle
    assert not waiting
    assert all(its.num_generated == its.params.max_tokens for its in everything)
    assert pool.free == pool.num_blocks


def test_finishing_a_waiting_sequence_forgets_it() -> None:
    scheduler = Scheduler(BlockPool(4, 4), max_batch_size=1, max_num_tokens=8)
    first, second = sequence(0, 4, 4), sequence(1, 4, 4)
    scheduler.add(first)
    scheduler.add(second)
    advance(scheduler)
    scheduler.finish(second)
    assert list(scheduler) == [first]
