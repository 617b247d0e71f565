"""Rows, positions and slots of a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfire.errors import InternalError
from meshfire.sched.batch import forward_batch
from meshfire.sched.parts import StepPart
from tests.unit.sched.naming import sequence_of


def part_of(token_ids: list[int], start: int, stop: int, block_table: list[int], block_tokens: int = 4) -> StepPart:
    sequence = sequence_of(token_ids, block_tokens=block_tokens)
    sequence.block_table = block_table
    return StepPart(sequence, start, stop)


def test_each_sequence_brings_its_newest_token_and_all_of_its_blocks() -> None:
    batch = forward_batch([part_of([5, 6, 7, 8, 9], 4, 5, [10, 3]), part_of([1, 2], 1, 2, [7])])
    assert batch.token_ids.tolist() == [9, 2]
    assert batch.positions.tolist() == [4, 1]
    assert batch.slots.tolist() == [3 * 4 + 0, 7 * 4 + 1]
    assert [(one.start, one.stop, one.context_tokens) for one in batch.sequences] == [(0, 1, 5), (1, 2, 2)]
    assert [one.block_table.tolist() for one in batch.sequences] == [[10, 3], [7]]
    assert batch.token_ids.dtype == batch.slots.dtype == batch.positions.dtype == torch.int64


def test_a_chunk_in_the_middle_of_a_prompt_sees_what_is_before_it_and_nothing_after() -> None:
    batch = forward_batch([part_of([1, 2, 3, 4, 5, 6, 7, 8, 9], 2, 5, [1, 0, 6])])
    assert batch.token_ids.tolist() == [3, 4, 5]
    assert batch.slots.tolist() == [6, 7, 0]
    assert batch.sequences[0].context_tokens == 5
    assert batch.sequences[0].block_table.tolist() == [1, 0]


@pytest.mark.parametrize(("start", "stop"), [(2, 2), (1, 3), (-1, 1)])
def test_a_part_with_nothing_to_compute_is_a_defect(start: int, stop: int) -> None:
    with pytest.raises(InternalError, match="nothing to run"):
        forward_batch([part_of([1, 2], start, stop, [0])])


def test_a_token_without_a_block_is_a_defect() -> None:
    with pytest.raises(InternalError, match="do not hold"):
        forward_batch([part_of([1] * 5, 4, 5, [0])])


@given(
    block_tokens=st.integers(1, 8),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=5),
)
def test_slots_name_the_place_of_every_position_and_never_collide(
    block_tokens: int, lengths: list[tuple[int, int]]
) -> None:
    parts, next_block = [], 0
    for num_tokens, num_new in lengths:
        num_blocks = -(-num_tokens // block_tokens)
        table = list(range(next_block, next_block + num_blocks))[::-1]
        next_block += num_blocks
        parts.append(part_of([1] * num_tokens, max(0, num_tokens - num_new), num_tokens, table, block_tokens))
    batch = forward_batch(parts)
    assert len(set(batch.slots.tolist())) == len(batch.slots)
    for part, rows in zip(parts, batch.sequences, strict=True):
        for row in range(rows.start, rows.stop):
            position = int(batch.positions[row])
            block, offset = divmod(int(batch.slots[row]), block_tokens)
            assert part.sequence.block_table.index(block) * block_tokens + offset == position
        assert int(batch.positions[rows.stop - 1]) == rows.context_tokens - 1
