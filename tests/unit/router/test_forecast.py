"""Forecasts against a queue that is really played through, and what is refused for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfire.errors import OutOfCapacity
from services.router.forecast import ServiceTime, wait_s
from services.router.outlook import Newcomer, Outlook
from services.router.tickets import Priority


def learnt(per_token_s: float, fixed_s: float) -> ServiceTime:
    service = ServiceTime()
    for num_tokens in (10, 200, 30, 999, 50, 400):
        service.add(num_tokens, fixed_s + per_token_s * num_tokens)
    return service


def test_service_time_is_learnt_as_a_line() -> None:
    service = learnt(0.002, 0.5)
    assert service.expected(1000) == pytest.approx(2.5)
    assert service.expected(1) == pytest.approx(0.502)


def test_service_time_follows_a_change() -> None:
    service = learnt(0.0, 1.0)
    for _ in range(200):
        service.add(100, 3.0)
    assert service.expected(100) == pytest.approx(3.0, rel=0.02)


def test_nothing_known_is_no_time() -> None:
    assert ServiceTime().expected(1000) == 0.0
    equal = ServiceTime()
    for _ in range(3):
        equal.add(64, 2.0)
    assert equal.expected(5) == equal.expected(5000) == pytest.approx(2.0)


@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 2000), max_size=20),
    st.lists(st.tuples(st.integers(1, 2000), st.floats(0, 0.5)), max_size=5),
)
def test_a_wait_is_that_of_a_queue_played_through(
    num_free: int, before: list[int], running: list[tuple[int, float]]
) -> None:
    service = learnt(0.001, 1.0)
    ends = [0.0] * num_free + [service.left(tokens, elapsed_s) for tokens, elapsed_s in running]
    for num_tokens in before:
        start = min(ends)
        ends[ends.index(start)] = start + 1.0 + 0.001 * num_tokens
    assert wait_s(service, num_free=num_free, running=running, before=before) == pytest.approx(min(ends))


def test_without_a_slot_there_is_no_end_of_waiting() -> None:
    assert wait_s(ServiceTime(), num_free=0, running=[], before=[]) == float("inf")


def test_a_lease_that_runs_over_is_not_expected_to_end_now() -> None:
    service = learnt(0.0, 1.0)
    assert service.left(10, 0.4) == pytest.approx(0.6)
    assert service.left(10, 5.0) == pytest.approx(1.0)


NOW_S = 1000.0


def newcomer(left_s: float, **more: object) -> Newcomer:
    return Newcomer("m", Priority.ONLINE, "", 10, NOW_S + left_s, **more)  # type: ignore[arg-type]


def test_what_would_end_too_late_is_refused_with_when_to_come_again() -> None:
    outlook = Outlook(position=7, wait_s=12.0, service_s=3.0)
    outlook.check(newcomer(15.0), NOW_S)
    with pytest.raises(OutOfCapacity) as caught:
        outlook.check(newcomer(10.0), NOW_S)
    assert caught.value.metadata == {"queue_position": "7", "predicted_wait_ms": "12000"}
    # With 10 s of time and 3 s of service it can bear to wait for 7 of the 12.
    assert caught.value.retry_after_s == pytest.approx(5.0)


def test_what_need_not_wait_is_tried_however_little_time_it_has() -> None:
    Outlook(position=0, wait_s=0.0, service_s=30.0).check(newcomer(1.0), NOW_S)


def test_asynchronous_work_is_not_judged_by_its_deadline() -> None:
    one = Newcomer("m", Priority.ASYNCHRONOUS, "", 10, NOW_S + 1)
    Outlook(position=7, wait_s=12.0, service_s=3.0).check(one, NOW_S)


def test_who_never_waits_is_refused_at_once() -> None:
    busy = Outlook(position=1, wait_s=0.2, service_s=0.1)
    with pytest.raises(OutOfCapacity):
        busy.check(newcomer(100.0, never_waits=True), NOW_S)
    Outlook(0, 0.0, 0.1).check(newcomer(100.0, never_waits=True), NOW_S)
