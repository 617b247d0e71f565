"""What is believed of an agent that comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshfire.discovery.base import Instance, KvEntry
from meshfire.discovery.last_good import LastGoodDocument, LastGoodInstances

A, B, C = (Instance("s", name, f"127.0.0.1:{port}") for name, port in (("a", 1), ("b", 2), ("c", 3)))
GRACE_S = 10.0


def test_without_trouble_every_answer_is_believed() -> None:
    good = LastGoodInstances(GRACE_S)
    assert good.answered([B, A], 0) == (A, B)
    assert good.answered([], 1) == ()


def test_after_trouble_the_missing_stand_until_the_grace_period_ends() -> None:
    good = LastGoodInstances(GRACE_S)
    good.answered([A, B], 0)
    good.trouble()
    assert good.answered([], 100) == (A, B)  # the period starts with the first answer, not with the trouble
    assert good.answered([C], 109) == (A, B, C)
    assert good.patience_s(109, 30) == 1
    assert good.answered([C], 110) == (C,)
    assert good.patience_s(110, 30) == 30


def test_the_grace_period_ends_early_once_all_are_back() -> None:
    good = LastGoodInstances(GRACE_S)
    good.answered([A], 0)
    good.trouble()
    good.answered([], 1)
    assert good.answered([A, B], 2) == (A, B)
    assert good.answered([B], 3) == (B,)


def test_an_instance_that_returns_elsewhere_is_shown_where_it_is_now() -> None:
    good = LastGoodInstances(GRACE_S)
    good.answered([A, B], 0)
    good.trouble()
    moved = Instance("s", "a", "127.0.0.1:9")
    assert good.answered([moved], 1) == (moved, B)


def test_an_agent_that_was_never_known_may_say_that_there_is_nothing() -> None:
    good = LastGoodInstances(GRACE_S)
    good.trouble()
    assert good.answered([], 0) == ()


@given(
    st.lists(st.tuples(st.booleans(), st.sets(st.sampled_from([A, B, C])), st.floats(0, 6)), min_size=1, max_size=20)
)
def test_nothing_vanishes_within_the_grace_period_and_the_truth_wins_after_it(
    history: list[tuple[bool, set[Instance], float]],
) -> None:
    good = LastGoodInstances(GRACE_S)
    shown: tuple[Instance, ...] = ()
    now_s = 0.0
    for troubled, answer, gap_s in history:
        now_s += gap_s
        if troubled:
            good.trouble()
        before, shown = shown, good.answered(sorted(answer, key=lambda one: one.instance_id), now_s)
        assert answer <= set(shown)
        if good.is_recovering(now_s):
            assert set(before) <= set(shown)
    assert set(good.answered([A], now_s + GRACE_S)) == {A}


def test_a_document_that_a_restarted_agent_forgot_stands_until_it_is_written_again() -> None:
    good = LastGoodDocument()
    old, new = KvEntry(b"old", 7), KvEntry(b"new", 2)
    assert good.answered(old, 0) == old
    good.trouble()
    assert good.answered(None, 1) == old
    assert good.answered(None, 1000) == old
    assert good.answered(new, 1001) == new
    assert good.answered(None, 1002) is None  # deleted while the agent was there
