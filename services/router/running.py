"""Leases that are at a worker now, by model and stage: how long each has run, and what leases of its kind take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.router.forecast import ServiceTime
from services.router.lifecycle_events import Stage
from services.router.tickets import Ticket

Kind = tuple[str, Stage]


@dataclass(frozen=True)
class Run:
    """One lease under way."""

    ticket: Ticket
    worker_id: str
    since_s: float

    def progress(self, now_s: float) -> tuple[int, float]:
        """Its tokens, and the seconds that it has run."""
        return self.ticket.num_tokens, now_s - self.since_s


class Running:
    """`clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._runs: dict[str, Run] = {}
        self._service: defaultdict[Kind, ServiceTime] = defaultdict(ServiceTime)

    def service(self, kind: Kind) -> ServiceTime:
        """What leases of a model and stage take."""
        return self._service[kind]

    def of(self, kind: Kind) -> Iterator[Run]:
        """Leases of a model and stage."""
        return (run for run in self._runs.values() if (run.ticket.model, run.ticket.stage) == kind)

    def began(self, ticket: Ticket, worker_id: str) -> None:
        """A lease went out. A request has one at a time."""
        self._runs[ticket.request_id] = Run(ticket, worker_id, self._clock())

    def done(self, request_id: str) -> None:
        """It was completed: what it took is measured."""
        run = self._runs.pop(request_id, None)
        if run is not None:
            kind = (run.ticket.model, run.ticket.stage)
            self._service[kind].add(run.ticket.num_tokens, self._clock() - run.since_s)

    def gone(self, request_id: str) -> None:
        """It ended in any other way, which says nothing about others."""
        self._runs.pop(request_id, None)

    def count(self, kind: Kind) -> int:
        """How many leases of a model and stage there are."""
        return sum(1 for _ in self.of(kind))
