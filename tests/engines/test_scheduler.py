"""Blocks and scheduling without a model: ownership, budgets, preemption, progress."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import engines.runtime.scheduler as scheduler_module
from engines.errors import EngineError
from engines.request import SamplingParams
from engines.runtime.blocks import BlockPool, block_key, root_key
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
    with pytest.raises(EngineError, match="3 is in 2 tables and has 1 owners"):
        pool.check([a, [2, 3]])
    with pytest.raises(EngineError, match="2 is in 0 tables and has 1 owners"):
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


def prioritised(number: int, prompt: int, max_tokens: int, priority: int) -> Sequence:
    its = sequence(number, prompt, max_tokens)
    its.priority = priority
    return its


def test_a_short_prompt_behind_a_long_one_gets_its_share_of_the_next_step() -> None:
    scheduler = Scheduler(BlockPool(1000, 4), max_batch_size=8, max_num_tokens=16)
    scheduler.add(sequence(0, 2000, 1))
    assert advance(scheduler) == [(0, 16)]
    scheduler.add(sequence(1, 6, 1))
    assert advance(scheduler) == [(0, 10), (1, 6)]
    assert advance(scheduler) == [(0, 16)]


def test_many_short_prompts_do_not_stop_the_long_one() -> None:
    scheduler = Scheduler(BlockPool(1000, 4), max_batch_size=8, max_num_tokens=16)
    scheduler.add(sequence(0, 160, 1))
    for number in range(1, 200):
        scheduler.add(sequence(number, 8, 1))
    steps = 0
    while any(its.number == 0 for its in scheduler):
        advance(scheduler)
        steps += 1
    assert steps <= 2 * 160 / 16


def test_priority_decides_who_starts_and_who_gives_way() -> None:
    scheduler = Scheduler(BlockPool(100, 4), max_batch_size=1, max_num_tokens=16)
    scheduler.add(prioritised(0, 4, 50, 1))
    advance(scheduler)
    scheduler.add(prioritised(1, 4, 3, 5))
    scheduler.add(prioritised(2, 4, 3, -1))
    assert advance(scheduler) == [(2, 4)], "the urgent one takes the running one's place"
    while any(its.number == 2 for its in scheduler):
        advance(scheduler)
    assert [its.number for its in scheduler] == [0, 1]
    assert scheduler.preemptions == 1


def test_equal_priority_never_preempts_for_a_place() -> None:
    scheduler = Scheduler(BlockPool(100, 4), max_batch_size=1, max_num_tokens=16)
    scheduler.add(sequence(0, 4, 50))
    advance(scheduler)
    scheduler.add(sequence(1, 4, 3))
    for _ in range(10):
        advance(scheduler)
    assert scheduler.preemptions == 0


def test_a_prompt_that_does_not_fit_is_passed_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_PASSED", 6)
    scheduler = Scheduler(BlockPool(20, 4), max_batch_size=4, max_num_tokens=64)
    scheduler.add(sequence(0, 40, 30))
    advance(scheduler)
    big = sequence(1, 44, 1)  # 11 blocks, and 10 of 20 are taken
    scheduler.add(big)
    started = []
    for number in range(2, 14):
        scheduler.add(sequence(number, 4, 1))
        started += [its for its, count in advance(scheduler) if count == 4]
    assert started == [2, 3, 4, 5, 6, 7]
    while scheduler.waiting and scheduler.waiting[0] is big:
        assert (13, 4) not in advance(scheduler)
    assert big.table or big.num_generated


def keyed(number: int, tokens: list[int], max_tokens: int = 1, salt: str = "") -> Sequence:
    its = Sequence(number, list(tokens), len(tokens), SamplingParams(max_tokens=max_tokens), 0, frozenset())
    its.keys, its.root = [], root_key("engine", salt)
    return its


def run_through(scheduler: Scheduler, *sequences: Sequence) -> None:
    for its in sequences:
        scheduler.add(its)
    while not scheduler.idle:
        chunks = scheduler.schedule()
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
            scheduler.remember(chunk.sequence)
            if chunk.sequence.remaining == 0:
                chunk.sequence.tokens.append(7)
                if chunk.sequence.num_generated >= chunk.sequence.params.max_tokens:
                    scheduler.finish(chunk.sequence)
        scheduler.check()


def test_a_prefix_is_found_by_tokens_salt_and_engine() -> None:
    scheduler = Scheduler(BlockPool(40, 4), max_batch_size=4, max_num_tokens=64)
    base = list(range(20))
    run_through(scheduler, keyed(0, base))
    assert scheduler.pool.cached == 5
    same, longer, other = keyed(1, base), keyed(2, base + [9] * 9), keyed(3, [5, *base[1:]])
    salted = keyed(4, base, salt="tenant")
    run_through(scheduler, same)
    run_through(scheduler, longer)
    run_through(scheduler, other)
    run_through(scheduler, salted)
    assert [its.cached_tokens for its in (same, longer, other, salted)] == [16, 20, 0, 0]
    assert root_key("engine", "a") != root_key("enginea", "")


def test_a_colliding_key_is_a_miss_not_another_text() -> None:
    scheduler = Scheduler(BlockPool(40, 4), max_batch_size=4, max_num_tokens=64)
    run_through(scheduler, keyed(0, list(range(20))))
    forged = keyed(1, [50] * 20)
    forged.keys = list(keyed_keys(list(range(20))))
    run_through(scheduler, forged)
    assert forged.cached_tokens == 0


def keyed_keys(tokens: list[int]) -> Iterator[bytes]:
    parent = root_key("engine", "")
    for start in range(0, len(tokens), 4):
        parent = block_key(parent, tokens[start:start + 4])
        yield parent


def test_the_least_recently_used_tail_goes_first() -> None:
    scheduler = Scheduler(BlockPool(12, 4), max_batch_size=1, max_num_tokens=64)
    run_through(scheduler, keyed(0, [1] * 20))
    run_through(scheduler, keyed(1, [2] * 20))
    assert scheduler.pool.cached == 10
    run_through(scheduler, keyed(2, [3] * 16))  # takes the free blocks, and the tail of the oldest
    old, fresh = keyed(3, [1] * 21), keyed(4, [2] * 21)
    scheduler.add(fresh)
    scheduler.schedule()
    assert fresh.computed == 20
    scheduler.finish(fresh)
    scheduler.add(old)
    scheduler.schedule()
    assert 0 < old.computed < 20
    scheduler.finish(old)
    scheduler.check()


def test_two_running_sequences_share_blocks_and_each_owns_them() -> None:
    scheduler = Scheduler(BlockPool(12, 4), max_batch_size=4, max_num_tokens=64)
    run_through(scheduler, keyed(0, [1] * 16))
    a, b = keyed(1, [1] * 17, 3), keyed(2, [1] * 18, 3)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.schedule()
    assert a.table[:4] == b.table[:4]
    scheduler.check()
    scheduler.finish(a)
    scheduler.check()
    assert [scheduler.pool.owners[block] for block in b.table[:4]] == [1] * 4


@pytest.mark.parametrize("seed", range(6))
def test_random_loads_with_prefixes_priorities_and_aborts_keep_the_books(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = int(random.integers(1, 6))
    scheduler = Scheduler(BlockPool(-(-40 // size) + int(random.integers(0, 12)), size), int(random.integers(1, 6)),
                          int(random.integers(1, 30)), longest=40)
    waiting = []
    for number in range(60):
        its = keyed(number, random.integers(0, 2, int(random.integers(1, 25))).tolist(), int(random.integers(1, 15)),
                    salt=str(random.integers(2)))
        its.priority = int(random.integers(-1, 2))
        waiting.append(its)
    everything, aborted = list(waiting), set()
    for _ in range(20_000):
        if waiting and random.random() < 0.3:
            scheduler.add(waiting.pop())
        if scheduler.idle and not waiting:
            break
        if not scheduler.idle and random.random() < 0.02:
            victim = list(scheduler)[int(random.integers(len(list(scheduler))))]
            scheduler.finish(victim)
            aborted.add(victim)
        for chunk in scheduler.schedule():
            chunk.sequence.computed += chunk.count
            scheduler.remember(chunk.sequence)
            if chunk.sequence.remaining == 0:
                chunk.sequence.tokens.append(int(random.integers(2)))
                if chunk.sequence.num_generated >= chunk.sequence.params.max_tokens:
                    scheduler.finish(chunk.sequence)
        scheduler.check()
    assert scheduler.idle
    assert all(its in aborted or its.num_generated == its.params.max_tokens for its in everything)
    assert scheduler.pool.used == 0
    assert scheduler.pool.forget() + scheduler.pool.free > 0
    assert scheduler.pool.free == scheduler.pool.num_blocks
