"""Where waiting leases and workers with room meet.

Owns the queues, the worker table and the requests under way. Decides nothing itself: order is the queue's, the choice
placement's, what a message means the request's life. Everything here is synchronous and on one loop.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.errors import OutOfCapacity, WorkerLost
from services.router import forecast
from services.router import lifecycle_events as ev
from services.router.lease_queue import LeaseQueue
from services.router.lifecycle_events import Stage
from services.router.local_prompts import LocalPrompts
from services.router.outlook import Newcomer, Outlook
from services.router.placement import Crowd, Placement, Wait, choose, goes_local
from services.router.running import Running
from services.router.tickets import Priority, Ticket
from services.router.workers import Worker, WorkerTable

_log = logging.getLogger(__name__)

NO_LOCAL_PROMPTS = LocalPrompts()


class Party(Protocol):
    """A request as the desk sees it."""

    def handle(self, event: ev.Event) -> None:
        """Something happened to it."""


class Desk:
    """`send` reaches a worker's stream; `clock` is monotonic, in seconds."""

    def __init__(
        self,
        *,
        max_requests: int,
        max_tokens: int,
        clock: Callable[[], float],
        ageing_s: float = float("inf"),
        local_prompts: LocalPrompts = NO_LOCAL_PROMPTS,
    ) -> None:
        self.workers = WorkerTable(local_prompts.serve_alone)
        self._local_prompts = local_prompts
        self._bounds = (max_requests, max_tokens)
        self._ageing_s = ageing_s
        self._clock = clock
        self._running = Running(clock)
        self._arrivals = itertools.count(1)
        self._queues: dict[tuple[str, Stage], LeaseQueue] = {}
        #: waiting requests for which an asynchronous lease was taken back
        self._room_made: set[str] = set()
        self._parties: dict[str, Party] = {}
        self._senders: dict[Worker, Callable[[pb.WorkResponse], None]] = {}

    # --- requests

    def admit(self, newcomer: Newcomer) -> Outlook:
        """How long it will wait. Raises QueueFull or OutOfCapacity, with when to come again."""
        queue = self._queue(newcomer.model, self._first_stage(newcomer.model))
        outlook = self.outlook(newcomer)
        queue.admit(newcomer.priority, newcomer.num_tokens, outlook.retry_after_s(0.0))
        outlook.check(newcomer, self._clock())
        return outlook

    def outlook(self, newcomer: Newcomer) -> Outlook:
        """What a newcomer has before it. Asynchronous leases count as free slots for who is online."""
        stage, now_s = self._first_stage(newcomer.model), self._clock()
        kind = (newcomer.model, stage)
        before = self._queue(*kind).before(newcomer.priority, newcomer.tenant, newcomer.num_tokens, now_s)
        gives_way = newcomer.priority is Priority.ONLINE
        runs = [run for run in self._running.of(kind) if not (gives_way and run.ticket.priority > newcomer.priority)]
        num_free = self._num_free(kind) + self._running.count(kind) - len(runs)
        service = self._running.service(kind)
        wait_s = forecast.wait_s(
            service,
            num_free=num_free,
            running=[run.progress(now_s) for run in runs],
            before=[ticket.num_tokens for ticket in before],
        )
        service_s = service.expected(newcomer.num_tokens)
        if wait_s == float("inf"):  # every slot is another router's: they come free at about the pace of ours
            wait_s = service_s
        if stage is Stage.PREFILL:
            service_s += self._running.service((newcomer.model, Stage.DECODE)).expected(newcomer.num_tokens)
        waits = bool(before) or num_free <= 0
        return Outlook(len(before) + 1 if waits else 0, wait_s if waits else 0.0, service_s)

    def idle_room(self, model: str) -> int:
        """Requests that could be placed now from beginning to end, with nobody waiting for it."""
        stages = [Stage.DECODE] if self._first_stage(model) is Stage.DECODE else [Stage.PREFILL, Stage.DECODE]
        room = [self._num_free((model, stage)) - len(self._queue(model, stage)) for stage in stages]
        if Stage.PREFILL in stages:  # what is being computed will want to be decoded
            room[-1] -= self._running.count((model, Stage.PREFILL))
        return max(0, min(room))

    def num_asynchronous(self, model: str) -> int:
        """Asynchronous requests of a model that wait or run."""
        kinds = [(model, stage) for stage in Stage]
        running = sum(run.ticket.priority is Priority.ASYNCHRONOUS for kind in kinds for run in self._running.of(kind))
        waiting = sum(self._queue(*kind).count(Priority.ASYNCHRONOUS) for kind in kinds)
        return running + waiting

    @property
    def now_s(self) -> float:
        """Of its clock."""
        return self._clock()

    def next_arrival(self) -> int:
        """Place in the queue of a request that is admitted now."""
        return next(self._arrivals)

    def register(self, request_id: str, party: Party) -> None:
        """Deliver events to a request from now on."""
        self._parties[request_id] = party

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._parties.pop(request_id, None)
        self._running.gone(request_id)

    def routed(self, ticket: Ticket) -> Ticket:
        """Where a prompt waits: for a prefill worker, or for a decode worker that computes it itself."""
        limit = self._local_prompts.limit(ticket.model)
        if ticket.stage is not Stage.PREFILL or not goes_local(ticket, self._crowd(ticket.model), limit):
            return ticket
        # Room for the first token of the output as well.
        return replace(ticket, stage=Stage.DECODE, local_max_tokens=limit, num_tokens=ticket.num_tokens + 1)

    def enqueue(self, ticket: Ticket) -> None:
        """Let a lease wait; it may be placed before this returns."""
        self._running.gone(ticket.request_id)
        self._queue(ticket.model, ticket.stage).push(ticket)
        self._place(ticket.model, ticket.stage)

    def dequeue(self, ticket: Ticket) -> None:
        """The lease waits no more."""
        self._room_made.discard(ticket.request_id)
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
        worker.credit(credit.num_slots, credit.num_free_blocks, credit.num_leases_seen, credit.num_pending_tokens)
        self._place(worker.facts.model, worker.facts.stage)

    def deliver(self, request_id: str, event: ev.Event) -> None:
        """Hand an event to a request; to one that is over it is old news."""
        if isinstance(event, ev.Offered | ev.Completed):
            self._running.done(request_id)
        elif isinstance(event, ev.LeaseFailed | ev.WorkerGone | ev.Preempted):
            self._running.gone(request_id)
        party = self._parties.get(request_id)
        if party is None:
            _log.debug("%s for request %s, which is over", type(event).__name__, request_id)
        else:
            party.handle(event)

    # --- matching

    def _place(self, model: str, stage: Stage) -> None:
        """Give waiting leases to workers with room, in order."""
        queue = self._queue(model, stage)
        for ticket in queue.in_order(self._clock()):
            if ticket.request_id not in queue:  # what was done for one before it ended this one's wait
                continue
            if self._is_too_late(ticket):
                self.deliver(ticket.request_id, ev.DeadlinePassed(_too_late()))
                continue
            if not self._may_place(ticket):
                return
            choice = choose(ticket, self._crowd(model))
            if isinstance(choice, Placement):
                self._hand_over(queue, ticket, choice)
                continue
            self._make_room(ticket)
            if choice is Wait.NO_BLOCKS:
                return

    def _crowd(self, model: str) -> Crowd:
        return Crowd(self.workers.of(model, Stage.PREFILL), self.workers.of(model, Stage.DECODE))

    def _first_stage(self, model: str) -> Stage:
        """Where most newcomers wait first."""
        alone = not self.workers.of(model, Stage.PREFILL) and self._local_prompts.limit(model) > 0
        return Stage.DECODE if alone else Stage.PREFILL

    def _may_place(self, ticket: Ticket) -> bool:
        """Whether it is worth looking for a worker: somebody has a slot, or may have one for somebody online."""
        kind = (ticket.model, ticket.stage)
        return self._num_free(kind) > 0 or (ticket.priority is Priority.ONLINE and self._preemptible(kind) is not None)

    def _is_too_late(self, ticket: Ticket) -> bool:
        """Even placed now it would not end in time. What produced tokens already goes on: the client has them."""
        if ticket.resumed or ticket.stage is not Stage.PREFILL:
            return False
        expected_s = self._running.service((ticket.model, ticket.stage)).expected(ticket.num_tokens)
        return self._clock() + expected_s > ticket.deadline_s

    def _make_room(self, ticket: Ticket) -> None:
        """Take an asynchronous lease back, once, for somebody online: the youngest, which loses least."""
        if ticket.priority is not Priority.ONLINE or ticket.request_id in self._room_made:
            return
        victim = self._preemptible((ticket.model, ticket.stage))
        if victim is not None:
            self._room_made.add(ticket.request_id)
            self.deliver(victim, ev.Preempted())

    def _preemptible(self, kind: tuple[str, Stage]) -> str | None:
        runs = [run for run in self._running.of(kind) if run.ticket.priority is Priority.ASYNCHRONOUS]
        youngest = max(runs, key=lambda run: run.since_s, default=None)
        return None if youngest is None else youngest.ticket.request_id

    def _num_free(self, kind: tuple[str, Stage]) -> int:
        return sum(max(0, worker.free_slots) for worker in self.workers.of(*kind))

    def _hand_over(self, queue: LeaseQueue, ticket: Ticket, placement: Placement) -> None:
        queue.take(ticket)
        self._room_made.discard(ticket.request_id)
        worker = placement.worker
        worker.lease_sent(worker.blocks_for(ticket.num_tokens), ticket.num_tokens - placement.num_cached)
        self._running.began(ticket, worker.facts.worker_id)
        is_local = ticket.local_max_tokens is not None
        placed = ev.Placed(worker.facts.worker_id, placement.reason.value, placement.num_cached, is_local)
        self.deliver(ticket.request_id, placed)

    def _queue(self, model: str, stage: Stage) -> LeaseQueue:
        key = (model, stage)
        if key not in self._queues:
            max_requests, max_tokens = self._bounds
            self._queues[key] = LeaseQueue(max_requests=max_requests, max_tokens=max_tokens, ageing_s=self._ageing_s)
        return self._queues[key]


def _too_late() -> OutOfCapacity:
    return OutOfCapacity("the request waited until its deadline could not be met any more", retry_after_s=1.0)
