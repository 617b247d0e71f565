"""Leases that wait for a worker of one model and stage: online before asynchronous, first come first served inside.

Owns order and bounds. Knows no workers. The place in the queue is the request's, not the lease's: work that is leased
anew after a failure goes in front of requests that came later.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from meshfire.errors import QueueFull
from services.router.lifecycle_events import Stage
from services.router.workers import WorkerFacts


class Priority(IntEnum):
    """Who goes first: lower values do."""

    ONLINE = 1
    ASYNCHRONOUS = 2


@dataclass(frozen=True, order=True)
class Ticket:
    """One waiting lease. Order of fields = order of the queue."""

    priority: Priority
    #: grows with every request that the router admits
    arrival: int
    request_id: str = field(compare=False)
    model: str = field(compare=False)
    stage: Stage = field(compare=False)
    #: tokens whose KV the lease needs room for
    num_tokens: int = field(compare=False)
    session_key: str = field(default="", compare=False)
    #: a worker that failed last: any other one is better
    avoid: str | None = field(default=None, compare=False)
    #: a prefill that goes on with an output needs the revision that began it
    revision: str | None = field(default=None, compare=False)
    #: a decode needs a worker that can read this one's KV
    kv_owner: WorkerFacts | None = field(default=None, compare=False)


class LeaseQueue:
    """Bounded for newcomers; what was admitted once may always come back."""

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._tickets: list[Ticket] = []

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        """Tickets in order; a snapshot, so that the queue may change meanwhile."""
        return iter(tuple(self._tickets))

    def admit(self, priority: Priority, num_tokens: int, retry_after_s: float) -> None:
        """QueueFull unless a newcomer may wait. Only those before it count, not a crowd of asynchronous work."""
        before = [ticket for ticket in self._tickets if ticket.priority <= priority]
        waiting_tokens = sum(ticket.num_tokens for ticket in before)
        if len(before) >= self._max_requests:
            raise QueueFull(f"{len(before)} requests wait already", retry_after_s=retry_after_s)
        # A lone prompt is let in whatever its size: it could never come otherwise.
        if before and waiting_tokens + num_tokens > self._max_tokens:
            raise QueueFull(f"{waiting_tokens} prompt tokens wait already", retry_after_s=retry_after_s)

    def push(self, ticket: Ticket) -> None:
        """Wait."""
        bisect.insort(self._tickets, ticket)

    def remove(self, ticket: Ticket) -> None:
        """Wait no more; unknown tickets are no error."""
        index = bisect.bisect_left(self._tickets, ticket)
        if index < len(self._tickets) and self._tickets[index].request_id == ticket.request_id:
            del self._tickets[index]
