"""Order and bounds of the queue; fairness against a deficit round robin done step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfire.errors import QueueFull
from services.router.lease_queue import QUANTUM_TOKENS, LeaseQueue
from services.router.lifecycle_events import Stage
from services.router.tickets import Priority, Ticket

ONLINE, ASYNCHRONOUS = Priority.ONLINE, Priority.ASYNCHRONOUS


def ticket(arrival: int, priority: Priority = ONLINE, **more: object) -> Ticket:
    return replace(Ticket(priority, arrival, f"q{arrival}", "m", Stage.PREFILL, 32), **more)


def queue(*tickets: Ticket, **more: float) -> LeaseQueue:
    made = LeaseQueue(max_requests=1000, max_tokens=10**9, **more)
    for one in tickets:
        made.push(one)
    return made


def order(waiting: LeaseQueue, now_s: float = 0.0) -> list[int]:
    return [one.arrival for one in waiting.in_order(now_s)]


def test_online_goes_before_asynchronous_and_earlier_before_later() -> None:
    tickets = [ticket(1, ASYNCHRONOUS), ticket(4), ticket(2, ASYNCHRONOUS), ticket(3)]
    waiting = queue(*tickets)
    assert order(waiting) == [4, 3, 1, 2] or order(waiting) == [3, 4, 1, 2]
    waiting.remove(tickets[1])
    waiting.remove(tickets[1])
    assert order(waiting) == [3, 1, 2]


def test_what_was_leased_before_goes_first_and_the_oldest_of_it() -> None:
    waiting = queue(ticket(1, tenant="a"), ticket(9, resumed=True), ticket(5, resumed=True, tenant="b"))
    assert order(waiting) == [5, 9, 1]


def test_asynchronous_work_that_waited_long_counts_as_online() -> None:
    waiting = queue(ticket(1, ASYNCHRONOUS, admitted_s=0.0), ticket(2, admitted_s=50.0), ageing_s=60.0)
    assert order(waiting, now_s=59.0) == [2, 1]
    assert order(waiting, now_s=60.0) == [1, 2]


def test_a_tenant_with_many_requests_does_not_hold_up_one_with_few() -> None:
    many = [ticket(number, tenant="many", num_tokens=QUANTUM_TOKENS) for number in range(1, 51)]
    waiting = queue(*many, ticket(51, tenant="few", num_tokens=QUANTUM_TOKENS))
    assert order(waiting)[:3] == [1, 51, 2]


def test_a_tenant_saves_nothing_up_while_it_is_away() -> None:
    waiting = queue()
    for number in range(40):
        one = ticket(number, tenant="busy", num_tokens=QUANTUM_TOKENS)
        waiting.push(one)
        waiting.take(one)
    for number in range(40, 44):
        waiting.push(ticket(number, tenant="late", num_tokens=QUANTUM_TOKENS))
    waiting.push(ticket(44, tenant="busy", num_tokens=QUANTUM_TOKENS))
    assert order(waiting).index(44) <= 2, "one turn each after the round under way, not four for the one that was away"


def test_who_would_be_before_a_newcomer() -> None:
    waiting = queue(*(ticket(number, tenant="many", num_tokens=QUANTUM_TOKENS) for number in range(1, 6)))
    waiting.push(ticket(6, ASYNCHRONOUS))
    assert len(waiting.before(ONLINE, "few", QUANTUM_TOKENS, 0.0)) == 1
    assert len(waiting.before(ONLINE, "many", QUANTUM_TOKENS, 0.0)) == 5
    assert len(waiting.before(ASYNCHRONOUS, "few", 32, 0.0)) == 6


def served_by_round_robin(waiting: Sequence[Ticket]) -> list[int]:
    """Shreedhar and Varghese's own loop: deficits, a ring of tenants, a quantum a visit."""
    queues: dict[str, deque[Ticket]] = {}
    for one in waiting:
        queues.setdefault(one.tenant, deque()).append(one)
    deficits, served = dict.fromkeys(queues, 0), []
    while queues:
        visit: list[Ticket] = []
        for tenant in list(queues):
            deficits[tenant] += QUANTUM_TOKENS
            while queues[tenant] and queues[tenant][0].num_tokens <= deficits[tenant]:
                one = queues[tenant].popleft()
                deficits[tenant] -= one.num_tokens
                visit.append(one)
            if not queues[tenant]:
                del queues[tenant]
        # Inside a round the ring's order is ours to choose: by arrival.
        served += [one.arrival for one in sorted(visit, key=lambda one: one.arrival)]
    return served


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5 * QUANTUM_TOKENS)), max_size=30), st.data())
def test_the_order_is_that_of_deficit_round_robin(wanted: list[tuple[str, int]], data: st.DataObject) -> None:
    tickets = [ticket(number, tenant=tenant, num_tokens=tokens) for number, (tenant, tokens) in enumerate(wanted)]
    waiting = queue(*tickets)
    assert order(waiting) == served_by_round_robin(tickets)
    gone = data.draw(st.sets(st.sampled_from(tickets), max_size=len(tickets)) if tickets else st.just(set()))
    for one in gone:
        waiting.remove(one)
    assert order(waiting) == served_by_round_robin([one for one in tickets if one not in gone])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3 * QUANTUM_TOKENS)), min_size=9, max_size=60))
def test_tenants_that_always_wait_are_served_alike(wanted: list[tuple[str, int]]) -> None:
    """At any moment two tenants that still wait differ by what one quantum and one lease allow."""
    tickets = [ticket(number, tenant=tenant, num_tokens=tokens) for number, (tenant, tokens) in enumerate(wanted)]
    waiting, got = queue(*tickets), dict.fromkeys("abc", 0)
    while len(waiting):
        first = waiting.in_order(0.0)[0]
        waiting.take(first)
        got[first.tenant] += first.num_tokens
        left = {one.tenant for one in waiting.in_order(0.0)}
        for one in left:
            for other in left:
                assert got[one] - got[other] <= 2 * QUANTUM_TOKENS + 3 * QUANTUM_TOKENS


class TestBounds:
    def test_a_crowd_of_asynchronous_work_stops_no_online_request(self) -> None:
        waiting = LeaseQueue(max_requests=2, max_tokens=1000)
        for number in (1, 2):
            waiting.push(ticket(number, ASYNCHRONOUS))
        waiting.admit(ONLINE, 10, 1.0)
        with pytest.raises(QueueFull) as caught:
            waiting.admit(ASYNCHRONOUS, 10, 3.5)
        assert caught.value.retry_after_s == 3.5

    def test_prompt_tokens_are_bounded_but_a_lone_prompt_comes_in(self) -> None:
        waiting = LeaseQueue(max_requests=9, max_tokens=40)
        waiting.admit(ONLINE, 1000, 1.0)
        waiting.push(ticket(1))  # of 32 tokens
        waiting.admit(ONLINE, 8, 1.0)
        with pytest.raises(QueueFull):
            waiting.admit(ONLINE, 9, 1.0)
