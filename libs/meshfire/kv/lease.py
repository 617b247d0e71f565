"""The life of an offered KV as one pure state machine, run by its owner (prefill) and mirrored by its reader (decode).

    state          entered by                ends by                                         who frees when time is up
    ─────────────  ────────────────────────  ──────────────────────────────────────────────  ─────────────────────────
    OFFERED        the prefill is done       Granted; OwnerReleased; TimedOut                owner
    GRANTED        the router's grant        ReadStarted; Released; a newer grant; …         owner
    READING        the reader's ReadKv       Acknowledged; ReadAborted → GRANTED; …          owner (and ends the read)
    ACKNOWLEDGED   the reader verified all   Released; OwnerReleased; TimedOut               owner (nobody needs it)
    RELEASED       any of those              –                                               –

"Freed" means: the owner drops the lease's block references; what is published stays behind as ordinary prefix cache.
That happens exactly once, on the one step into RELEASED. Messages may be lost, doubled or out of order: a doubled one
changes nothing, one of an older epoch is refused, and a lost one ends in TimedOut. A newer grant (higher epoch) hands
an unread lease to another reader; the old reader's messages are stale from then on.

Knows nothing of clocks, blocks or transport: every event carries its time in seconds of one monotonic clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from meshfire.errors import IllegalTransition, KvExpired, KvNotGranted, StaleEpoch


class LeaseState(enum.Enum):
    """Where a lease is."""

    OFFERED = "offered"
    GRANTED = "granted"
    READING = "reading"
    ACKNOWLEDGED = "acknowledged"
    RELEASED = "released"


class Outcome(enum.Enum):
    """How a lease got to RELEASED."""

    ACKNOWLEDGED = "acknowledged"  # read and verified
    ABANDONED = "abandoned"  # the reader gave up
    WITHDRAWN = "withdrawn"  # the owner ended it: cancelled, draining
    EXPIRED = "expired"  # nobody came in time


@dataclass(frozen=True)
class LeaseTimeouts:
    """How long each state may last, seconds."""

    offered_s: float = 30.0
    granted_s: float = 30.0
    reading_s: float = 60.0
    acknowledged_s: float = 5.0

    def of(self, state: LeaseState) -> float:
        """Seconds that `state` may last; RELEASED lasts for ever."""
        return {
            LeaseState.OFFERED: self.offered_s,
            LeaseState.GRANTED: self.granted_s,
            LeaseState.READING: self.reading_s,
            LeaseState.ACKNOWLEDGED: self.acknowledged_s,
            LeaseState.RELEASED: float("inf"),
        }[state]


@dataclass(frozen=True)
class KvLease:
    """One offered KV. Made by `offer`; every later value comes from `apply`."""

    lease_id: str
    #: worker that holds the blocks and frees them
    owner_id: str
    #: grows with every new grant
    epoch: int
    #: chain hash of every block, first to last
    block_hashes: tuple[bytes, ...]
    #: when `state` ends by itself, seconds
    deadline: float
    #: the request's own deadline; no state outlives it
    last_deadline: float
    timeouts: LeaseTimeouts = LeaseTimeouts()
    state: LeaseState = LeaseState.OFFERED
    #: worker that may read; None before the first grant
    reader_id: str | None = None
    #: set exactly in RELEASED
    outcome: Outcome | None = None

    @property
    def released(self) -> bool:
        """Whether the blocks are freed."""
        return self.state is LeaseState.RELEASED


@dataclass(frozen=True)
class Granted:
    """The router names the reader."""

    epoch: int
    reader_id: str
    now: float


@dataclass(frozen=True)
class ReadStarted:
    """The reader asks for the blocks."""

    epoch: int
    reader_id: str
    now: float


@dataclass(frozen=True)
class ReadAborted:
    """The stream broke before its trailer; the same reader may try again."""

    epoch: int
    reader_id: str
    now: float


@dataclass(frozen=True)
class Acknowledged:
    """The reader verified everything."""

    epoch: int
    reader_id: str
    now: float


@dataclass(frozen=True)
class Released:
    """The reader needs the lease no longer: it acknowledged, or it gives up."""

    epoch: int
    reader_id: str
    now: float


@dataclass(frozen=True)
class OwnerReleased:
    """The owner ends the lease: the request was cancelled, or the worker drains."""


@dataclass(frozen=True)
class TimedOut:
    """The owner looked at the clock. Changes nothing before the deadline."""

    now: float


ReaderEvent = ReadStarted | ReadAborted | Acknowledged | Released
Event = Granted | ReaderEvent | OwnerReleased | TimedOut


def offer(
    lease_id: str,
    *,
    owner_id: str,
    epoch: int,
    block_hashes: tuple[bytes, ...],
    now: float,
    last_deadline: float = float("inf"),
    timeouts: LeaseTimeouts = LeaseTimeouts(),
) -> KvLease:
    """A new lease, OFFERED at `now`."""
    deadline = min(now + timeouts.offered_s, last_deadline)
    return KvLease(lease_id, owner_id, epoch, block_hashes, deadline, last_deadline, timeouts)


def apply(lease: KvLease, event: Event) -> KvLease:
    """The lease after `event`; the same object where a repeated message changes nothing.

    Raises StaleEpoch (older epoch), KvNotGranted (no grant, or another reader's), KvExpired (released meanwhile),
    IllegalTransition (no such step). A refused event leaves the lease as it was.
    """
    match event:
        case TimedOut(now):
            return lease if now < lease.deadline else _release(lease, _timeout_outcome(lease))
        case OwnerReleased():
            return _release(lease, Outcome.WITHDRAWN)
        case Granted():
            return _grant(lease, event)
        case _:
            return _reader_step(lease, event)


def _grant(lease: KvLease, event: Granted) -> KvLease:
    _refuse_older(lease, event.epoch)
    if lease.released:
        raise _expired(lease)
    if lease.reader_id is None or event.epoch > lease.epoch:
        if lease.state is LeaseState.ACKNOWLEDGED:
            raise IllegalTransition(f"KV lease {lease.lease_id} was read by {lease.reader_id}; it has no second reader")
        granted = replace(lease, epoch=event.epoch, reader_id=event.reader_id)
        return _enter(granted, LeaseState.GRANTED, event.now)
    if event.reader_id != lease.reader_id:
        raise IllegalTransition(
            f"KV lease {lease.lease_id} is granted to {lease.reader_id} at epoch {lease.epoch}; "
            f"{event.reader_id} needs a newer epoch"
        )
    return lease


def _reader_step(lease: KvLease, event: ReaderEvent) -> KvLease:
    _refuse_older(lease, event.epoch)
    if lease.released:
        if isinstance(event, ReadStarted):
            raise _expired(lease)
        return lease
    if lease.reader_id is None or event.epoch > lease.epoch or event.reader_id != lease.reader_id:
        raise KvNotGranted(
            f"KV lease {lease.lease_id} is granted to {lease.reader_id or 'nobody'} at epoch {lease.epoch}, "
            f"not to {event.reader_id} at epoch {event.epoch}"
        )
    return _granted_step(lease, event)


def _granted_step(lease: KvLease, event: ReaderEvent) -> KvLease:
    match lease.state, event:
        case LeaseState.GRANTED, ReadStarted(now=now):
            return _enter(lease, LeaseState.READING, now)
        case LeaseState.READING, ReadAborted(now=now):
            return _enter(lease, LeaseState.GRANTED, now)
        case LeaseState.READING, Acknowledged(now=now):
            return _enter(lease, LeaseState.ACKNOWLEDGED, now)
        case (LeaseState.GRANTED, ReadAborted()) | (LeaseState.ACKNOWLEDGED, ReadAborted() | Acknowledged()):
            return lease  # doubled, or overtaken by the message after it
        case (LeaseState.ACKNOWLEDGED, Released()):
            return _release(lease, Outcome.ACKNOWLEDGED)
        case (_, Released()):
            return _release(lease, Outcome.ABANDONED)
        case _:
            raise IllegalTransition(f"KV lease {lease.lease_id} is {lease.state.value}; no {type(event).__name__} here")


def _enter(lease: KvLease, state: LeaseState, now: float) -> KvLease:
    return replace(lease, state=state, deadline=min(now + lease.timeouts.of(state), lease.last_deadline))


def _release(lease: KvLease, outcome: Outcome) -> KvLease:
    if lease.released:
        return lease
    return replace(lease, state=LeaseState.RELEASED, outcome=outcome, deadline=float("inf"))


def _timeout_outcome(lease: KvLease) -> Outcome:
    return Outcome.ACKNOWLEDGED if lease.state is LeaseState.ACKNOWLEDGED else Outcome.EXPIRED


def _refuse_older(lease: KvLease, epoch: int) -> None:
    if epoch < lease.epoch:
        raise StaleEpoch(
            f"KV lease {lease.lease_id} is at epoch {lease.epoch}, the message at {epoch}",
            metadata={"epoch": str(epoch), "current_epoch": str(lease.epoch)},
        )


def _expired(lease: KvLease) -> KvExpired:
    outcome = lease.outcome.value if lease.outcome else "gone"
    return KvExpired(f"KV lease {lease.lease_id} was released: {outcome}", metadata={"outcome": outcome})
