"""The KV lease: the table of its steps, and a model test over an unreliable network."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfire.errors import IllegalTransition, KvExpired, KvNotGranted, MeshfireError, StaleEpoch
from meshfire.kv.lease import (
    Acknowledged,
    Event,
    Granted,
    KvLease,
    LeaseState,
    LeaseTimeouts,
    Outcome,
    OwnerReleased,
    ReadAborted,
    ReadStarted,
    Released,
    TimedOut,
    apply,
    offer,
)

R1, R2 = "decode-1", "decode-2"
TIMEOUTS = LeaseTimeouts(offered_s=30, granted_s=20, reading_s=60, acknowledged_s=5)


def offered(last_deadline: float = 1000.0) -> KvLease:
    return offer(
        "kv-1",
        owner_id="prefill-1",
        epoch=3,
        block_hashes=(b"h" * 16,),
        now=0.0,
        last_deadline=last_deadline,
        timeouts=TIMEOUTS,
    )


def after(*events: Event) -> KvLease:
    lease = offered()
    for event in events:
        lease = apply(lease, event)
    return lease


GRANT = Granted(3, R1, 1.0)
READ = ReadStarted(3, R1, 2.0)
ABORT = ReadAborted(3, R1, 3.0)
ACK = Acknowledged(3, R1, 4.0)
RELEASE = Released(3, R1, 5.0)


def test_a_lease_walks_from_offered_to_released() -> None:
    states = [after(*(GRANT, READ, ACK, RELEASE)[:count]).state for count in range(5)]
    assert states == [
        LeaseState.OFFERED,
        LeaseState.GRANTED,
        LeaseState.READING,
        LeaseState.ACKNOWLEDGED,
        LeaseState.RELEASED,
    ]
    assert after(GRANT, READ, ACK, RELEASE).outcome is Outcome.ACKNOWLEDGED


def test_an_aborted_read_may_be_repeated_by_the_same_reader() -> None:
    assert after(GRANT, READ, ABORT).state is LeaseState.GRANTED
    assert after(GRANT, READ, ABORT, READ, ACK).state is LeaseState.ACKNOWLEDGED


@pytest.mark.parametrize("before", [(GRANT,), (GRANT, READ), (GRANT, READ, ABORT)])
def test_a_newer_grant_hands_an_unread_lease_to_another_reader(before: tuple[Event, ...]) -> None:
    lease = after(*before, Granted(4, R2, 9.0))
    assert (lease.state, lease.reader_id, lease.epoch) == (LeaseState.GRANTED, R2, 4)
    for late in (READ, ABORT, ACK, RELEASE, GRANT):
        with pytest.raises(StaleEpoch):
            apply(lease, late)


@pytest.mark.parametrize(
    ("before", "event"),
    [
        ((GRANT,), GRANT),
        ((GRANT, READ), GRANT),
        ((GRANT,), ABORT),
        ((GRANT, READ, ACK), ACK),
        ((GRANT, READ, ACK), ABORT),
        ((GRANT, READ, ACK, RELEASE), RELEASE),
        ((GRANT, READ, ACK, RELEASE), ACK),
        ((GRANT, RELEASE), RELEASE),
        ((OwnerReleased(),), OwnerReleased()),
        ((OwnerReleased(),), TimedOut(1e9)),
    ],
)
def test_a_doubled_message_changes_nothing(before: tuple[Event, ...], event: Event) -> None:
    lease = after(*before)
    assert apply(lease, event) is lease


@pytest.mark.parametrize(
    ("before", "event", "error"),
    [
        ((), READ, KvNotGranted),
        ((), ACK, KvNotGranted),
        ((), RELEASE, KvNotGranted),
        ((), Granted(2, R1, 1.0), StaleEpoch),
        ((GRANT,), ReadStarted(2, R1, 2.0), StaleEpoch),
        ((GRANT,), ReadStarted(4, R1, 2.0), KvNotGranted),
        ((GRANT,), ReadStarted(3, R2, 2.0), KvNotGranted),
        ((GRANT,), Granted(3, R2, 2.0), IllegalTransition),
        ((GRANT,), ACK, IllegalTransition),
        ((GRANT, READ), READ, IllegalTransition),
        ((GRANT, READ), Acknowledged(3, R2, 4.0), KvNotGranted),
        ((GRANT, READ, ACK), READ, IllegalTransition),
        ((GRANT, READ, ACK), Granted(4, R2, 5.0), IllegalTransition),
        ((GRANT, READ, ACK, RELEASE), READ, KvExpired),
        ((GRANT, READ, ACK, RELEASE), Granted(4, R2, 6.0), KvExpired),
        ((OwnerReleased(),), GRANT, KvExpired),
    ],
)
def test_a_message_out_of_place_is_refused(before: tuple[Event, ...], event: Event, error: type[MeshfireError]) -> None:
    with pytest.raises(error):
        apply(after(*before), event)


@pytest.mark.parametrize(
    ("before", "deadline", "outcome"),
    [
        ((), 30.0, Outcome.EXPIRED),
        ((GRANT,), 21.0, Outcome.EXPIRED),
        ((GRANT, READ), 62.0, Outcome.EXPIRED),
        ((GRANT, READ, ABORT), 23.0, Outcome.EXPIRED),
        ((GRANT, READ, ACK), 9.0, Outcome.ACKNOWLEDGED),
    ],
)
def test_every_state_ends_by_itself_at_its_deadline_and_not_before(
    before: tuple[Event, ...], deadline: float, outcome: Outcome
) -> None:
    lease = after(*before)
    assert apply(lease, TimedOut(deadline - 0.001)) is lease
    assert apply(lease, TimedOut(deadline)).outcome is outcome


def test_no_state_outlives_the_request() -> None:
    lease = apply(apply(offered(last_deadline=10.0), GRANT), READ)
    assert lease.deadline == 10.0
    assert apply(lease, TimedOut(10.0)).released


def test_a_reader_that_gives_up_abandons_the_lease() -> None:
    assert after(GRANT, RELEASE).outcome is Outcome.ABANDONED
    assert after(GRANT, READ, RELEASE).outcome is Outcome.ABANDONED


def messages_of_a_request(rng: random.Random) -> list[Event]:
    """What a router and up to two readers say about one lease, each of them in its own right order."""
    said: list[Event] = []
    for epoch, reader in ((3, R1), (4, R2))[: rng.randint(1, 2)]:
        said.append(Granted(epoch, reader, 0))
        for _ in range(rng.randint(0, 2)):
            said += [ReadStarted(epoch, reader, 0), ReadAborted(epoch, reader, 0)]
        if rng.random() < 0.7:
            said += [ReadStarted(epoch, reader, 0), Acknowledged(epoch, reader, 0)]
        said.append(Released(epoch, reader, 0))
    if rng.random() < 0.3:
        said.append(OwnerReleased())
    return said


def over_a_bad_network(said: list[Event], rng: random.Random) -> list[Event]:
    """Some lost, some doubled, some late."""
    arrived = [one for event in said for one in [event] * rng.choice([0, 1, 1, 1, 2])]
    keyed = sorted(enumerate(arrived), key=lambda item: item[0] + rng.choice([0, 0, 0, 4]))
    return [event for _, event in keyed]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.floats(0, 25), min_size=40, max_size=40))
def test_every_lease_ends_released_exactly_once_whatever_the_network_does(seed: int, pauses: list[float]) -> None:
    rng = random.Random(seed)
    lease, now, num_freed = offered(), 0.0, 0
    readers: set[tuple[int, str | None]] = set()
    events = over_a_bad_network(messages_of_a_request(rng), rng)
    for event, pause in zip(events, pauses):
        now += pause
        timed = event if isinstance(event, OwnerReleased) else type(event)(event.epoch, event.reader_id, now)  # type: ignore[union-attr,call-arg,arg-type]
        for step in (TimedOut(now), timed):
            try:
                following = apply(lease, step)
            except MeshfireError:
                continue
            num_freed += following.released and not lease.released
            assert following.epoch >= lease.epoch
            assert not lease.released or following is lease
            assert following.state is not LeaseState.READING or following.reader_id is not None
            assert (following.outcome is not None) == following.released
            assert following.released or now < following.deadline <= now + 60
            lease = following
            readers.add((lease.epoch, lease.reader_id))
    ended = apply(lease, TimedOut(now + 61))
    num_freed += ended.released and not lease.released
    assert ended.released
    assert num_freed == 1
    assert readers <= {(3, None), (3, R1), (4, R2)}
