"""What one step computes: one token of each output, and a bounded chunk beside them."""

from __future__ import annotations

from meshfire.kv.block_pool import BlockPool
from meshfire.sched.parts import ChunkBudget, next_parts
from meshfire.sched.policy import Scheduler
from meshfire.sched.sequence import Sequence
from tests.unit.sched.naming import P, sequence_of

BUDGET = ChunkBudget(beside_others=5, alone=9)


def scheduler_with(*prompts: list[int]) -> tuple[Scheduler, list[Sequence]]:
    scheduler = Scheduler(BlockPool(100), block_tokens=P, max_active=8, max_waiting=8)
    sequences = [sequence_of(prompt) for prompt in prompts]
    for one in sequences:
        scheduler.add(one)
    for one in scheduler.admit():
        scheduler.compute(one)
    return scheduler, sequences


def step(scheduler: Scheduler, budget: ChunkBudget = BUDGET) -> list[tuple[int, int]]:
    """(start, stop) of each part; the parts are then computed."""
    parts = next_parts(scheduler, budget)
    for one in parts:
        if one.is_last:
            one.sequence.append(9)
        scheduler.computed(one.sequence, one.stop)
    scheduler.grow()
    return [(one.start, one.stop) for one in parts]


def test_a_lone_prompt_takes_the_larger_budget_and_then_one_token_a_step() -> None:
    scheduler, _ = scheduler_with([1] * 20)
    assert [step(scheduler) for _ in range(5)] == [[(0, 9)], [(9, 18)], [(18, 20)], [(20, 21)], [(21, 22)]]


def test_prompts_share_the_budget_oldest_first_beside_every_output() -> None:
    scheduler, _ = scheduler_with([1], [2] * 7, [3] * 3, [4] * 9)
    assert step(scheduler) == [(0, 1), (0, 5)]
    assert step(scheduler) == [(1, 2), (5, 7), (0, 3)]
    assert step(scheduler) == [(2, 3), (7, 8), (3, 4), (0, 5)]


def test_a_last_token_that_is_missing_is_no_chunk() -> None:
    scheduler, _ = scheduler_with(*([n] for n in range(8)))
    assert step(scheduler, ChunkBudget(1, 1)) == [(0, 1)] * 8


def test_of_equal_prompts_the_oldest_computes_and_the_others_take_its_blocks_over() -> None:
    prompt = list(range(11))
    scheduler, (first, second, third) = scheduler_with(prompt, prompt, [*prompt[:6], 50, 51, 52])
    assert step(scheduler) == [(0, 9)]
    # The third has its own second block; nobody waits for what is not going to be shared.
    assert step(scheduler) == [(9, 11), (8, 11), (4, 8)]
    assert first.block_table[:2] == second.block_table[:2]
    assert third.block_table[0] == first.block_table[0]
    assert third.block_table[1] != first.block_table[1]


def test_who_waits_for_an_older_one_goes_on_alone_when_it_leaves() -> None:
    prompt = list(range(20))
    scheduler, (first, second) = scheduler_with(prompt, prompt)
    assert step(scheduler) == [(0, 9)]
    scheduler.remove(first)
    assert step(scheduler) == [(8, 17)]
    assert step(scheduler) == [(17, 20)]
    assert second.num_output_tokens == 1


def test_states_that_are_wanted_are_computed_though_an_equal_prompt_was() -> None:
    prompt = list(range(8))
    scheduler, (_, second) = scheduler_with(prompt, prompt)
    second.wanted_from = 0
    assert step(scheduler) == [(0, 8), (0, 1)]
