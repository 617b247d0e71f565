"""Leases that wait for a worker of one model and stage.

Owns order and bounds. Online goes before asynchronous, but what has waited for `ageing_s` counts as online, so that
nothing starves. Inside a class: first what was leased before (a failure must not send it to the end), oldest first;
then by deficit round robin between tenants, first come first served within each. Knows no workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshfire.errors import QueueFull
from services.router.fairness import Rounds
from services.router.tickets import Priority, Ticket

#: tokens that a tenant may have placed before the next one's turn
QUANTUM_TOKENS = 2048
#: behind every arrival
_LAST = 1 << 62


@dataclass
class _Waiting:
    ticket: Ticket
    #: of the deficit round robin; 0 = in front of all rounds
    round_number: int

    def key(self, now_s: float, ageing_s: float) -> tuple[int, int, int]:
        aged = now_s - self.ticket.admitted_s >= ageing_s
        priority = Priority.ONLINE if aged else self.ticket.priority
        return priority, self.round_number, self.ticket.arrival


class LeaseQueue:
    """Bounded for newcomers; what was admitted once may always come back. Times are of the caller's clock."""

    def __init__(self, *, max_requests: int, max_tokens: int, ageing_s: float = float("inf")) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._ageing_s = ageing_s
        self._rounds = {priority: Rounds(QUANTUM_TOKENS) for priority in Priority}
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def count(self, priority: Priority) -> int:
        """Leases of a class."""
        return sum(one.ticket.priority is priority for one in self._waiting.values())

    def in_order(self, now_s: float) -> list[Ticket]:
        """Who is next; a snapshot, so that the queue may change meanwhile."""
        found = sorted(self._waiting.values(), key=lambda one: one.key(now_s, self._ageing_s))
        return [one.ticket for one in found]

    def before(self, priority: Priority, tenant: str, num_tokens: int, now_s: float) -> list[Ticket]:
        """Who would be placed before a newcomer, were it to wait now."""
        key = (priority, self._rounds[priority].due(tenant, num_tokens), _LAST)
        return [one.ticket for one in self._waiting.values() if one.key(now_s, self._ageing_s) < key]

    def admit(self, priority: Priority, num_tokens: int, retry_after_s: float) -> None:
        """QueueFull unless a newcomer may wait. Only its own class and those before it count: a crowd of asynchronous
        work stops no online request."""
        same = [one.ticket for one in self._waiting.values() if one.ticket.priority <= priority]
        waiting_tokens = sum(ticket.num_tokens for ticket in same)
        if len(same) >= self._max_requests:
            raise QueueFull(f"{len(same)} requests wait already", retry_after_s=retry_after_s)
        # A lone prompt is let in whatever its size: it could never come otherwise.
        if same and waiting_tokens + num_tokens > self._max_tokens:
            raise QueueFull(f"{waiting_tokens} prompt tokens wait already", retry_after_s=retry_after_s)

    def push(self, ticket: Ticket) -> None:
        """Wait."""
        due = 0 if ticket.resumed else self._rounds[ticket.priority].join(ticket.tenant, ticket.num_tokens)
        self._waiting[ticket.request_id] = _Waiting(ticket, due)

    def take(self, ticket: Ticket) -> None:
        """It is placed: its tenant's turn is used."""
        waiting = self._waiting.pop(ticket.request_id)
        self._rounds[ticket.priority].served(waiting.round_number)

    def remove(self, ticket: Ticket) -> None:
        """It waits no more and used no turn: its tenant's others move up. Unknown tickets are no error."""
        if self._waiting.pop(ticket.request_id, None) is None or ticket.resumed:
            return
        rounds = self._rounds[ticket.priority]
        rounds.restart(ticket.tenant)
        for one in sorted(self._of(ticket), key=lambda waiting: waiting.ticket.arrival):
            one.round_number = rounds.join(ticket.tenant, one.ticket.num_tokens)

    def _of(self, ticket: Ticket) -> Iterator[_Waiting]:
        """Others of its tenant and class that wait for their first lease."""
        for one in self._waiting.values():
            other = one.ticket
            if not other.resumed and (other.tenant, other.priority) == (ticket.tenant, ticket.priority):
                yield one
