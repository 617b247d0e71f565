"""The scheduler's rules one by one; what holds for any order of events is in test_machine.py."""

from __future__ import annotations

import pytest

from meshfire.errors import InternalError, PromptTooLong, QueueFull
from meshfire.kv.block_pool import BlockPool
from meshfire.sched.policy import Scheduler
from meshfire.sched.sequence import Sequence, SequenceState
from tests.unit.sched.naming import P, sequence_of


def scheduler_over(num_blocks: int, *, max_active: int = 4, max_waiting: int = 4) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks)
    return Scheduler(pool, block_tokens=P, max_active=max_active, max_waiting=max_waiting), pool


def started(scheduler: Scheduler, token_ids: list[int]) -> Sequence:
    """Its KV came from elsewhere."""
    sequence = sequence_of(token_ids, kv_comes=True)
    scheduler.add(sequence)
    assert scheduler.admit() == [sequence]
    scheduler.arrived(sequence)
    return sequence


def step(scheduler: Scheduler, token_id: int = 7) -> list[Sequence]:
    """What an engine does with sequences in the middle of their output: grow, compute, append."""
    preempted = scheduler.grow()
    for sequence in scheduler.running:
        sequence.append(token_id)
        scheduler.computed(sequence, sequence.num_tokens - 1)
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
    second = sequence_of([*range(8), 99], kv_comes=True)
    scheduler.add(second)
    scheduler.admit()
    assert second.num_held_blocks == 2
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert pool.num_free == 10 - 4


def test_a_partial_block_is_never_shared() -> None:
    scheduler, _ = scheduler_over(10)
    first = started(scheduler, list(range(6)))
    second = sequence_of(list(range(6)), kv_comes=True)
    scheduler.add(second)
    scheduler.admit()
    assert second.num_held_blocks == 1
    assert set(second.block_table[1:]).isdisjoint(first.block_table)


@pytest.mark.parametrize(("wanted_from", "num_computed"), [(None, 4), (0, 0), (3, 0), (7, 4)])
def test_a_sequence_that_is_computed_keeps_the_hidden_states_that_are_wanted(
    wanted_from: int | None, num_computed: int
) -> None:
    """All 8 tokens are published; the last one's state is wanted in any case."""
    scheduler, _ = scheduler_over(10)
    started(scheduler, list(range(8)))
    sequence = sequence_of(list(range(8)))
    sequence.wanted_from = wanted_from
    scheduler.add(sequence)
    scheduler.admit()
    scheduler.compute(sequence)
    assert sequence.num_computed_tokens == num_computed


def test_a_block_is_allocated_when_a_sequence_crosses_the_border_and_not_before() -> None:
    scheduler, _ = scheduler_over(10)
    sequence = started(scheduler, [1, 2, 3])
    sizes = []
    for _ in range(6):
        step(scheduler)
        sizes.append(len(sequence.block_table))
    assert sizes == [1, 1, 2, 2, 2, 2]  # tokens to compute: 3 (none yet), 4, 5, 6, 7, 8


def test_blocks_that_an_output_fills_are_shared() -> None:
    scheduler, _ = scheduler_over(10)
    first = started(scheduler, [1, 2])
    for token_id in range(10, 18):
        step(scheduler, token_id)
    second = sequence_of([1, 2, *range(10, 18)])
    scheduler.add(second)
    scheduler.admit()
    assert second.num_held_blocks == 2, "9 of the 10 tokens are computed"
    assert second.block_table[:2] == first.block_table[:2]


def test_the_newest_is_preempted_and_the_oldest_gets_its_block() -> None:
    scheduler, pool = scheduler_over(7)
    old = started(scheduler, [1] * 4)
    middle = started(scheduler, [2] * 4)
    new = started(scheduler, [3] * 3)
    hoarded = pool.allocate(pool.num_free)
    for sequence in (old, middle, new):
        sequence.append(9)
    assert scheduler.grow() == [new, middle]
    assert new.state is middle.state is SequenceState.WAITING
    assert len(old.block_table) == 2
    pool.release(hoarded)
    late = sequence_of([4])
    scheduler.add(late)
    scheduler.remove(old)
    assert scheduler.admit() == [middle, new, late], "in order of arrival"


def test_a_preempted_sequence_finds_its_blocks_again_and_computes_the_rest() -> None:
    scheduler, pool = scheduler_over(9)
    old = started(scheduler, [1] * 4)
    new = started(scheduler, [2] * 4)
    for _ in range(6):
        step(scheduler)
    hoarded = pool.allocate(pool.num_free)
    for _ in range(3):
        old.append(9)
    assert scheduler.grow() == [new]
    assert not new.kv_comes
    pool.release(hoarded)
    assert scheduler.admit() == [new]
    scheduler.compute(new)
    assert (new.num_tokens, new.num_computed_tokens) == (10, 8)


def test_a_sequence_that_reads_its_kv_is_preempted_like_a_running_one_and_reads_again() -> None:
    scheduler, pool = scheduler_over(4)
    old = started(scheduler, [1] * 4)
    reading = sequence_of([2] * 4, kv_comes=True)
    scheduler.add(reading)
    scheduler.admit()
    hoarded = pool.allocate(pool.num_free)
    old.append(9)
    assert scheduler.grow() == [reading]
    assert reading.kv_comes
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
        scheduler.arrived(sequence)
    with pytest.raises(InternalError):
        scheduler.compute(sequence)
    scheduler.remove(sequence)
    scheduler.remove(sequence)
    pool.check()
    assert pool.num_free == 4


def test_kv_that_comes_from_elsewhere_is_not_computed() -> None:
    scheduler, _ = scheduler_over(4)
    sequence = sequence_of([1], kv_comes=True)
    scheduler.add(sequence)
    scheduler.admit()
    with pytest.raises(InternalError, match="elsewhere"):
        scheduler.compute(sequence)
