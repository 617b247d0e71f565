"""The block pool against a brute-force model, and its refusals one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshfire.errors import InternalError, NoFreeBlocks
from meshfire.kv.block_pool import BlockPool

NUM_BLOCKS = 6
NAMES = st.sampled_from([b"a", b"b", b"c", b"d"])  # few, so that most searches find something


class PoolAgainstModel(RuleBasedStateMachine):
    """The model keeps, for each holder, its list of blocks, and all published names; it searches, never indexes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[list[int]] = []
        self.names: dict[bytes, int] = {}
        self.retired: list[int] = []  # published and unheld, first = oldest

    def references(self, block: int) -> int:
        return sum(block in blocks for blocks in self.holders)

    def held(self) -> set[int]:
        return {block for block in range(NUM_BLOCKS) if self.references(block)}

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        room = NUM_BLOCKS - len(self.held())
        if count > room:
            with pytest.raises(NoFreeBlocks):
                self.pool.allocate(count)
            return
        num_unused = room - len(self.retired)
        evicted = self.retired[: max(0, count - num_unused)]
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & self.held()
        assert set(blocks) & set(self.retired) == set(evicted)
        self.retired = self.retired[len(evicted) :]
        self.names = {name: block for name, block in self.names.items() if block not in evicted}
        self.holders.append(blocks)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from([one for one in self.holders if one]))
        self.pool.share(blocks)
        self.holders.append(list(blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        blocks = self.holders.pop(index)
        self.pool.release(blocks)
        published = set(self.names.values())
        self.retired += [one for one in reversed(blocks) if not self.references(one) and one in published]

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), name=NAMES)
    def publish(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.held())))
        if block in self.names.values():
            return
        assert self.pool.publish(block, name) == (name not in self.names)
        self.names.setdefault(name, block)

    @rule(names=st.lists(NAMES, max_size=4, unique=True))
    def match(self, names: list[bytes]) -> None:
        expected: list[int] = []
        for name in names:
            if name not in self.names:
                break
            expected.append(self.names[name])
        assert self.pool.num_matched(names) == len(expected)
        assert self.pool.match(names) == expected
        self.retired = [one for one in self.retired if one not in expected]
        self.holders.append(expected)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.check()
        assert self.pool.num_free == NUM_BLOCKS - len(self.held())
        assert self.pool.num_cached == len(self.retired)


PoolAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolAgainstModel = PoolAgainstModel.TestCase


def test_the_tail_of_a_cached_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    names = [b"a", b"b", b"c"]
    for block, name in zip(blocks, names):
        pool.publish(block, name)
    pool.release(blocks)
    pool.release(pool.allocate(1))
    assert pool.match(names) == blocks[:2]


def test_a_refused_allocation_takes_nothing() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(NoFreeBlocks) as caught:
        pool.allocate(2)
    assert caught.value.metadata == {"wanted_blocks": "2", "free_blocks": "1"}
    assert pool.num_free == 1
    pool.check()


def test_releasing_a_block_twice_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(3)
    kept, freed = pool.allocate(2)
    pool.release([freed])
    with pytest.raises(InternalError):
        pool.release([kept, freed])
    with pytest.raises(InternalError):
        pool.release([kept, kept])
    pool.release([kept])
    assert pool.num_free == 3
    pool.check()


def test_a_block_keeps_the_first_name_it_was_published_under() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    assert pool.publish(block, b"a")
    assert pool.publish(block, b"a")
    with pytest.raises(InternalError):
        pool.publish(block, b"b")
    assert pool.num_matched([b"b"]) == 0
    pool.check()


@pytest.mark.parametrize("block", [-1, 0, 2])
def test_a_block_that_nobody_holds_cannot_be_shared_or_published(block: int) -> None:
    pool = BlockPool(2)
    with pytest.raises(InternalError):
        pool.share([block])
    with pytest.raises(InternalError):
        pool.publish(block, b"a")


def test_check_notices_a_lost_block() -> None:
    pool = BlockPool(2)
    pool._free.pop()
    with pytest.raises(InternalError):
        pool.check()
