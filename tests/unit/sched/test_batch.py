"""Rows, positions and slots of a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfire.errors import InternalError
from meshfire.sched.batch import forward_batch
from meshfire.sched.sequence import Sequence


def test_each_sequence_brings_its_newest_token_and_all_of_its_blocks() -> None:
    first = Sequence([5, 6, 7, 8, 9], 3, num_computed_tokens=4, block_table=[10, 3])
    second = Sequence([1, 2], 2, num_computed_tokens=1, block_table=[7])
    batch = forward_batch([first, second], 4)
    assert batch.token_ids.tolist() == [9, 2]
    assert batch.positions.tolist() == [4, 1]
    assert batch.slots.tolist() == [3 * 4 + 0, 7 * 4 + 1]
    assert [(one.start, one.stop, one.context_tokens) for one in batch.sequences] == [(0, 1, 5), (1, 2, 2)]
    assert [one.block_table.tolist() for one in batch.sequences] == [[10, 3], [7]]
    assert batch.token_ids.dtype == batch.slots.dtype == batch.positions.dtype == torch.int64


def test_a_chunk_of_several_tokens_is_one_slice() -> None:
    batch = forward_batch([Sequence([1, 2, 3, 4, 5], 5, num_computed_tokens=2, block_table=[1, 0])], 4)
    assert batch.token_ids.tolist() == [3, 4, 5]
    assert batch.slots.tolist() == [6, 7, 0]
    assert batch.sequences[0].context_tokens == 5


def test_a_sequence_with_nothing_to_compute_is_a_defect() -> None:
    with pytest.raises(InternalError, match="nothing to run"):
        forward_batch([Sequence([1, 2], 2, num_computed_tokens=2, block_table=[0])], 4)


def test_a_token_without_a_block_is_a_defect() -> None:
    with pytest.raises(InternalError, match="do not hold"):
        forward_batch([Sequence([1] * 5, 5, num_computed_tokens=4, block_table=[0])], 4)


@given(
    block_tokens=st.integers(1, 8),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=5),
)
def test_slots_name_the_place_of_every_position_and_never_collide(
    block_tokens: int, lengths: list[tuple[int, int]]
) -> None:
    sequences, next_block = [], 0
    for num_tokens, num_new in lengths:
        num_blocks = -(-num_tokens // block_tokens)
        table = list(range(next_block, next_block + num_blocks))[::-1]
        next_block += num_blocks
        computed = max(0, num_tokens - num_new)
        sequences.append(Sequence([1] * num_tokens, num_tokens, num_computed_tokens=computed, block_table=table))
    batch = forward_batch(sequences, block_tokens)
    assert len(set(batch.slots.tolist())) == len(batch.slots)
    for sequence, part in zip(sequences, batch.sequences, strict=True):
        for row in range(part.start, part.stop):
            position = int(batch.positions[row])
            block, offset = divmod(int(batch.slots[row]), block_tokens)
            assert sequence.block_table.index(block) * block_tokens + offset == position
        assert int(batch.positions[part.stop - 1]) == part.context_tokens - 1
