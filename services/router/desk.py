"""Where waiting leases and workers with room meet.

Owns the queues, the worker table and the requests under way. Decides nothing itself: order is the queue's, the choice
placement's, what a message means the request's life. Everything here is synchronous and on one loop.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Protocol

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.errors import WorkerLost
from services.router import lifecycle_events as ev
from services.router.lease_queue import LeaseQueue, Priority, Ticket
from services.router.lifecycle_events import Stage
from services.router.pace import Pace
from services.router.placement import Crowd, Wait, choose
from services.router.workers import Worker, WorkerTable

_log = logging.getLogger(__name__)


class Party(Protocol):
    """A request as the desk sees it."""

    def handle(self, event: ev.Event) -> None:
        """Something happened to it."""


class Desk:
    """`send` reaches a worker's stream; `clock` is monotonic, in seconds."""

    def __init__(self, *, max_requests: int, max_tokens: int, clock: Callable[[], float]) -> None:
        self.workers = WorkerTable()
        self._bounds = (max_requests, max_tokens)
        self._clock = clock
        self._arrivals = itertools.count(1)
        self._queues: dict[tuple[str, Stage], LeaseQueue] = {}
        self._paces: dict[str, Pace] = {}
        self._parties: dict[str, Party] = {}
        self._senders: dict[Worker, Callable[[pb.WorkResponse], None]] = {}

    # --- requests

    def admit(self, model: str, priority: Priority, num_tokens: int) -> None:
        """QueueFull unless another request may wait for prefill."""
        queue = self._queue(model, Stage.PREFILL)
        queue.admit(priority, num_tokens, self._pace(model).wait_s(len(queue) + 1))

    def next_arrival(self) -> int:
        """Place in the queue of a request that is admitted now."""
        return next(self._arrivals)

    def register(self, request_id: str, party: Party) -> None:
        """Deliver events to a request from now on."""
        self._parties[request_id] = party

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._parties.pop(request_id, None)

    def enqueue(self, ticket: Ticket) -> None:
        """Let a lease wait; it may be placed before this returns."""
        self._queue(ticket.model, ticket.stage).push(ticket)
        self._place(ticket.model, ticket.stage)

    def dequeue(self, ticket: Ticket) -> None:
        """The lease waits no more."""
        self._queue(ticket.model, ticket.stage).remove(ticket)

    def queue_depths(self) -> dict[tuple[str, Stage], int]:
        """Waiting leases per model and stage."""
        return {key: len(queue) for key, queue in self._queues.items()}

    def hold(self, worker_id: str, request_id: str, *, holds: bool) -> None:
        """Note whether a request holds something at a worker."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            (worker.held.add if holds else worker.held.discard)(request_id)

    def send(self, worker_id: str, message: pb.WorkResponse) -> None:
        """To a worker; dropped if it is gone, which its requests have been told or are about to be."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            self._senders[worker](message)

    # --- workers

    def join(self, worker: Worker, send: Callable[[pb.WorkResponse], None]) -> None:
        """A worker's stream is up. An older stream of the same worker is void from now on."""
        older = self.workers.get(worker.facts.worker_id)
        if older is not None:
            self.leave(older)
        self._senders[worker] = send
        self.workers.add(worker)

    def leave(self, worker: Worker) -> None:
        """A worker's stream is down: everything that it held fails over."""
        if not self.workers.remove(worker):
            return
        del self._senders[worker]
        lost = WorkerLost(f"worker {worker.facts.worker_id} left", metadata={"worker_id": worker.facts.worker_id})
        for request_id in sorted(worker.held):
            self.deliver(request_id, ev.WorkerGone(worker.facts.worker_id, lost))

    def credit(self, worker: Worker, credit: pb.WorkerCredit) -> None:
        """A worker's room changed."""
        worker.credit(credit.num_slots, credit.num_free_blocks, credit.num_leases_seen)
        self._place(worker.facts.model, worker.facts.stage)

    def deliver(self, request_id: str, event: ev.Event) -> None:
        """Hand an event to a request; to one that is over it is old news."""
        party = self._parties.get(request_id)
        if party is None:
            _log.debug("%s for request %s, which is over", type(event).__name__, request_id)
        else:
            party.handle(event)

    # --- matching

    def _place(self, model: str, stage: Stage) -> None:
        """Give waiting leases to workers with room, in order."""
        queue = self._queue(model, stage)
        for ticket in queue:
            if not any(worker.free_slots > 0 for worker in self.workers.of(model, stage)):
                return
            crowd = Crowd(self.workers.of(model, Stage.PREFILL), self.workers.of(model, Stage.DECODE))
            choice = choose(ticket, crowd)
            if choice is Wait.NO_BLOCKS:
                return
            if isinstance(choice, Worker):
                self._hand_over(queue, ticket, choice)

    def _hand_over(self, queue: LeaseQueue, ticket: Ticket, worker: Worker) -> None:
        queue.remove(ticket)
        worker.lease_sent(worker.blocks_for(ticket.num_tokens))
        if ticket.stage is Stage.PREFILL:
            self._pace(ticket.model).left(self._clock())
        self.deliver(ticket.request_id, ev.Placed(worker.facts.worker_id))

    def _queue(self, model: str, stage: Stage) -> LeaseQueue:
        key = (model, stage)
        if key not in self._queues:
            max_requests, max_tokens = self._bounds
            self._queues[key] = LeaseQueue(max_requests=max_requests, max_tokens=max_tokens)
        return self._queues[key]

    def _pace(self, model: str) -> Pace:
        return self._paces.setdefault(model, Pace())
