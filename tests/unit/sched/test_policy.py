"""The scheduler against its promises: no block is lost, none is invented, everybody finishes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfire.errors import InternalError, PromptTooLong, QueueFull
from meshfire.kv.block_pool import BlockPool
from meshfire.kv.hashing import chain_hashes
from meshfire.sched.policy import Scheduler
from meshfire.sched.sequence import Sequence, SequenceState

P = 4


def sequence_of(token_ids: list[int], num_prompt_tokens: int | None = None) -> Sequence:
    hashes = tuple(chain_hashes(token_ids, P, model_revision="r"))
    return Sequence(list(token_ids), num_prompt_tokens or len(token_ids), hashes)


def scheduler_over(num_blocks: int, *, max_active: int = 4, max_waiting: int = 4) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks)
    return Scheduler(pool, block_tokens=P, max_active=max_active, max_waiting=max_waiting), pool


def started(scheduler: Scheduler, token_ids: list[int]) -> Sequence:
    sequence = sequence_of(token_ids)
    scheduler.add(sequence)
    assert scheduler.admit() == [sequence]
    scheduler.start(sequence)
    return sequence


def step(scheduler: Scheduler, token_id: int = 7) -> list[Sequence]:
    """What an engine does: grow, compute, append."""
    preempted = scheduler.grow()
    for sequence in scheduler.running:
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.append(token_id)
    return preempted


def test_sequences_are_admitted_in_order_while_slots_last() -> None:
    scheduler, _ = scheduler_over(100, max_active=2)
    first, second, third = (sequence_of([n, n, n]) for n in range(3))
    for one in (first, second, third):
        scheduler.add(one)
    assert scheduler.admit() == [first, second]
    scheduler.remove(first)
    assert scheduler.admit() == [third]


def test_a_large_sequence_at_the_head_is_not_overtaken() -> None:
    scheduler, _ = scheduler_over(6)
    running = started(scheduler, [1] * 8)
    large, small = sequence_of([2] * 20), sequence_of([3])
    scheduler.add(large)
    scheduler.add(small)
    assert scheduler.admit() == []
    scheduler.remove(running)
    assert scheduler.admit() == [large]


def test_a_full_queue_refuses_and_says_how_full_it_is() -> None:
    scheduler, _ = scheduler_over(10, max_active=1, max_waiting=1)
    scheduler.add(sequence_of([1]))
    scheduler.add(sequence_of([2]))
    assert scheduler.num_slots == 0
    with pytest.raises(QueueFull):
        scheduler.add(sequence_of([3]))


def test_a_sequence_that_no_empty_pool_could_hold_is_refused_at_once() -> None:
    scheduler, _ = scheduler_over(2)
    scheduler.add(sequence_of([1] * 8))
    with pytest.raises(PromptTooLong) as refused:
        scheduler.add(sequence_of([1] * 9))
    assert refused.value.field == "token_ids"


def test_a_published_prefix_is_shared_and_only_the_rest_allocated() -> None:
    scheduler, pool = scheduler_over(10)
    first = started(scheduler, list(range(10)))
    second = sequence_of([*range(8), 99])
    scheduler.add(second)
    scheduler.admit()
    assert second.num_held_blocks == 2
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert pool.num_free == 10 - 4


def test_a_partial_block_is_never_shared() -> None:
    scheduler, _ = scheduler_over(10)
    first = started(scheduler, list(range(6)))
    second = sequence_of(list(range(6)))
    scheduler.add(second)
    scheduler.admit()
    assert second.num_held_blocks == 1
    assert set(second.block_table[1:]).isdisjoint(first.block_table)


def test_a_block_is_allocated_when_a_sequence_crosses_the_border_and_not_before() -> None:
    scheduler, _ = scheduler_over(10)
    sequence = started(scheduler, [1, 2, 3])
    sizes = []
    for _ in range(6):
        step(scheduler)
        sizes.append(len(sequence.block_table))
    assert sizes == [1, 1, 2, 2, 2, 2]  # tokens to compute: 3 (none yet), 4, 5, 6, 7, 8


def test_the_newest_is_preempted_and_the_oldest_gets_its_block() -> None:
    scheduler, pool = scheduler_over(5)
    old = started(scheduler, [1] * 4)
    middle = started(scheduler, [2] * 4)
    new = started(scheduler, [3] * 3)
    hoarded = pool.allocate(pool.num_free)
    for sequence in (old, middle, new):
        sequence.append(9)
    assert scheduler.grow() == [new, middle]
    assert new.state is middle.state is SequenceState.ENDED
    assert len(old.block_table) == 2
    pool.release(hoarded)
    scheduler.remove(old)
    pool.check()
    assert pool.num_free == 5


def test_a_sequence_that_reads_its_kv_is_preempted_like_a_running_one() -> None:
    scheduler, pool = scheduler_over(4)
    old = started(scheduler, [1] * 4)
    reading = sequence_of([2] * 4)
    scheduler.add(reading)
    scheduler.admit()
    hoarded = pool.allocate(pool.num_free)
    old.append(9)
    assert scheduler.grow() == [reading]
    pool.release(hoarded)


def test_blocks_wanted_by_those_who_wait_are_not_offered_to_others() -> None:
    scheduler, _ = scheduler_over(10, max_active=1)
    started(scheduler, [1] * 8)
    scheduler.add(sequence_of([2] * 9))
    assert scheduler.num_spare_blocks == 10 - 2 - 3


def test_ending_twice_is_no_error_and_starting_twice_is() -> None:
    scheduler, pool = scheduler_over(4)
    sequence = started(scheduler, [1])
    with pytest.raises(InternalError):
        scheduler.start(sequence)
    scheduler.remove(sequence)
    scheduler.remove(sequence)
    pool.check()
    assert pool.num_free == 4


def check(scheduler: Scheduler, pool: BlockPool, live: list[Sequence]) -> None:
    """Every block in use is in a live sequence's table; a sequence's table has no block twice."""
    pool.check()
    used = {block for one in live for block in one.block_table}
    assert pool.num_blocks - pool.num_free == len(used)
    for one in live:
        assert len(set(one.block_table)) == len(one.block_table)
        assert one.active or not one.block_table
    written = [one.block_table[one.num_tokens // P :] for one in live if one.active]
    flat = [block for blocks in written for block in blocks]
    assert len(set(flat)) == len(flat), "two sequences would write to one block"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_order_of_arrivals_steps_and_cancels_loses_or_doubles_a_block(data: st.DataObject) -> None:
    scheduler, pool = scheduler_over(data.draw(st.integers(2, 12)), max_active=data.draw(st.integers(1, 4)))
    live: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["add", "admit", "start", "step", "cancel"]))
        if action == "add":
            new = sequence_of(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=2 * P * 2)))
            try:
                scheduler.add(new)
            except (QueueFull, PromptTooLong):
                continue
            live.append(new)
        elif action == "admit":
            scheduler.admit()
        elif action == "start":
            for one in live:
                if one.state is SequenceState.READING:
                    scheduler.start(one)
        elif action == "step":
            if any(one.num_tokens >= pool.num_blocks * P for one in scheduler.running):
                continue
            for gone in step(scheduler):
                live.remove(gone)
        elif live:
            victim = live.pop(data.draw(st.integers(0, len(live) - 1)))
            scheduler.remove(victim)
        check(scheduler, pool, live)
    for one in live:
        scheduler.remove(one)
    pool.check()
    assert pool.num_free == pool.num_blocks


@settings(max_examples=100, deadline=None)
@given(
    num_blocks=st.integers(3, 10),
    max_active=st.integers(1, 5),
    wishes=st.lists(st.tuples(st.integers(1, 10), st.integers(1, 12)), min_size=1, max_size=8),
)
def test_every_sequence_finishes_though_preempted_ones_start_anew(
    num_blocks: int, max_active: int, wishes: list[tuple[int, int]]
) -> None:
    scheduler, pool = scheduler_over(num_blocks, max_active=max_active, max_waiting=100)
    capacity = num_blocks * P
    wanted: dict[int, int] = {}
    outside = []
    for name, (num_prompt, num_output) in enumerate(wishes):
        num_prompt = min(num_prompt, capacity - 1)
        wanted[name] = min(num_prompt + num_output, capacity)
        outside.append((name, [name] * num_prompt))
    names: dict[Sequence, int] = {}
    done: list[int] = []
    for _ in range(4000):
        for name, token_ids in outside:
            sequence = sequence_of(token_ids)
            names[sequence] = name
            scheduler.add(sequence)
        outside = []
        for sequence in scheduler.admit():
            scheduler.start(sequence)
        for gone in step(scheduler):
            outside.append((names[gone], gone.token_ids))
        for sequence in scheduler.running:
            if sequence.num_tokens >= wanted[names[sequence]]:
                scheduler.remove(sequence)
                done.append(names[sequence])
        if len(done) == len(wishes):
            break
    assert sorted(done) == list(range(len(wishes)))
    pool.check()
    assert pool.num_free == num_blocks
