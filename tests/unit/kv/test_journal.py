"""The journal against the pool itself: whoever applies all changes knows what can be shared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshfire.kv.block_pool import BlockPool
from meshfire.kv.journal import BlockJournal


@given(st.lists(st.tuples(st.sampled_from(["fill", "read", "release"]), st.integers(0, 11)), max_size=60))
def test_changes_add_up_to_what_can_be_shared(steps: list[tuple[str, int]]) -> None:
    journal = BlockJournal()
    pool = BlockPool(4, journal)
    held: list[int] = []
    known: set[bytes] = set()
    for kind, number in steps:
        if kind == "fill" and pool.num_free:
            (block,) = pool.allocate(1)
            pool.publish(block, bytes([number]) * 16)
            held.append(block)
        elif kind == "release" and held:
            pool.release([held.pop(number % len(held))])
        elif kind == "read":
            changes = journal.drain()
            assert not set(changes.stored) & set(changes.removed)
            assert not set(changes.stored) & known, "nothing is told twice"
            assert set(changes.removed) <= known
            known = (known | set(changes.stored)) - set(changes.removed)
            assert known == set(journal.shared())
    every = [bytes([number]) * 16 for number in range(12)]
    assert set(journal.shared()) == {one for one in every if pool.num_matched([one])}


def test_what_came_and_went_between_two_reads_is_not_told() -> None:
    journal = BlockJournal()
    journal.stored(b"a" * 16)
    journal.removed(b"a" * 16)
    assert not journal.drain()
