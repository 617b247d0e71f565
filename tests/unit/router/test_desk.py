"""The desk with workers that count credits and parties that note events: who goes first, is refused, gives way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.errors import OutOfCapacity
from services.router import lifecycle_events as ev
from services.router.desk import Desk
from services.router.lifecycle_events import Offer, Stage
from services.router.local_prompts import LocalPrompts
from services.router.outlook import Newcomer
from services.router.output import FinishReason
from services.router.tickets import Priority, Ticket
from services.router.workers import Geometry, Worker, WorkerFacts

ONLINE, ASYNCHRONOUS = Priority.ONLINE, Priority.ASYNCHRONOUS


@dataclass
class Party:
    """A request that comes back to the queue when it is preempted, as a real one does."""

    desk: Desk
    ticket: Ticket
    seen: list[ev.Event] = field(default_factory=list)

    def handle(self, event: ev.Event) -> None:
        self.seen.append(event)
        if isinstance(event, ev.Preempted):
            self.ticket = replace(self.ticket, resumed=True)
            self.desk.enqueue(self.ticket)

    @property
    def worker(self) -> str | None:
        placed = [event.worker_id for event in self.seen if isinstance(event, ev.Placed)]
        return placed[-1] if placed else None


class Room:
    """A desk, its workers and its clock."""

    def __init__(self, *slots: int) -> None:
        self.now = 0.0
        self.desk = Desk(max_requests=100, max_tokens=10**6, clock=lambda: self.now)
        self.workers: dict[str, Worker] = {}
        for number, count in enumerate(slots):
            self.join(f"p{number}", Stage.PREFILL, count)
        self.join("d", Stage.DECODE, 100)
        self.sent: dict[str, int] = dict.fromkeys(self.workers, 0)

    def join(self, name: str, stage: Stage, slots: int) -> None:
        facts = WorkerFacts(name, stage, "m", "r", Geometry(1, 16, 8, 1), "host:1", 4096, 100, frozenset())
        worker = self.workers[name] = Worker(facts)
        worker.credit(slots, 10_000, 0)
        self.desk.join(worker, lambda message: None)

    def ask(self, number: int, priority: Priority = ONLINE, **more: object) -> Party:
        ticket = replace(Ticket(priority, number, f"q{number}", "m", Stage.PREFILL, 100, admitted_s=self.now), **more)
        party = Party(self.desk, ticket)
        self.desk.register(ticket.request_id, party)
        self.desk.enqueue(ticket)
        return party

    def serve(self, party: Party) -> None:
        """Its prefill is done; the worker has room again."""
        name = party.worker
        assert name is not None
        self.desk.deliver(party.ticket.request_id, ev.Offered(name, 1, Offer("k", 100, 0, 0, 0)))
        self.free(name)

    def free(self, name: str, slots: int = 1) -> None:
        worker = self.workers[name]
        credit = pb.WorkerCredit(num_slots=slots, num_free_blocks=10_000, num_leases_seen=10**6)
        self.desk.credit(worker, credit)

    def newcomer(self, left_s: float = 100.0, **more: object) -> Newcomer:
        values: dict[str, object] = {"priority": ONLINE, "tenant": "", "num_tokens": 100} | more
        return Newcomer("m", deadline_s=self.now + left_s, **values)  # type: ignore[arg-type]


def test_the_predicted_wait_is_what_then_comes() -> None:
    room = Room(1)
    for number in range(5):  # each takes 2 s: learn it
        party = room.ask(number)
        room.now += 2.0
        room.serve(party)
    running, *waiting = [room.ask(number) for number in range(10, 14)]
    room.now += 0.5
    outlook = room.desk.admit(room.newcomer())
    assert outlook.position == 4
    assert outlook.wait_s == pytest.approx(1.5 + 3 * 2.0)
    with pytest.raises(OutOfCapacity) as caught:
        room.desk.admit(room.newcomer(left_s=6.0))
    assert caught.value.retry_after_s == pytest.approx(7.5 - (6.0 - 2.0))
    last = room.ask(20)
    began = room.now
    for party in (running, *waiting):
        room.now += 1.5 if party is running else 2.0
        room.serve(party)
    assert last.worker == "p0"
    assert room.now - began == pytest.approx(outlook.wait_s)


def test_an_idle_desk_refuses_nobody() -> None:
    room = Room(2)
    assert room.desk.admit(room.newcomer(left_s=0.001, never_waits=True)).position == 0


def test_who_never_waits_is_refused_when_all_slots_are_taken() -> None:
    room = Room(1)
    room.ask(1)
    with pytest.raises(OutOfCapacity):
        room.desk.admit(room.newcomer(never_waits=True))


def test_asynchronous_work_gives_its_slot_to_who_is_online() -> None:
    room = Room(1, 1)
    old = room.ask(1, ASYNCHRONOUS)
    room.now += 1.0
    young = room.ask(2, ASYNCHRONOUS)
    assert {old.worker, young.worker} == {"p0", "p1"}
    assert room.desk.admit(room.newcomer(never_waits=True)).position == 0, "asynchronous leases are free slots"
    room.now += 1.0
    online = room.ask(3)
    assert any(isinstance(event, ev.Preempted) for event in young.seen), "the youngest loses least"
    assert not any(isinstance(event, ev.Preempted) for event in old.seen), "one slot is enough"
    assert online.worker is None, "the worker has not let go yet"
    room.free(str(young.worker))
    assert online.worker == young.worker
    assert sum(isinstance(event, ev.Placed) for event in young.seen) == 1
    room.serve(online)
    assert sum(isinstance(event, ev.Placed) for event in young.seen) == 2, "it goes on when there is room"


def test_asynchronous_work_takes_no_slot_from_its_like() -> None:
    room = Room(1)
    first = room.ask(1, ASYNCHRONOUS)
    second = room.ask(2, ASYNCHRONOUS)
    assert not any(isinstance(event, ev.Preempted) for event in first.seen)
    assert second.worker is None


def test_what_can_no_more_end_in_time_is_not_begun() -> None:
    room = Room(1)
    for number in range(3):
        party = room.ask(number)
        room.now += 2.0
        room.serve(party)
    running = room.ask(10)
    late = room.ask(11, deadline_s=room.now + 3.0)
    room.now += 2.0
    room.serve(running)
    assert late.worker is None
    (ended,) = late.seen
    assert isinstance(ended, ev.DeadlinePassed)
    assert isinstance(ended.error, OutOfCapacity)


def test_a_worker_that_is_lost_tells_nothing_about_service_times() -> None:
    room = Room(1)
    room.ask(1)
    room.now += 500.0
    room.desk.leave(room.workers["p0"])
    room.join("p0", Stage.PREFILL, 1)
    room.ask(2)
    assert room.desk.outlook(room.newcomer()).wait_s < 100.0


def test_without_prefill_workers_prompts_wait_for_decode_and_the_wait_is_told() -> None:
    now = 0.0
    desk = Desk(
        max_requests=100,
        max_tokens=10**6,
        clock=lambda: now,
        local_prompts=LocalPrompts(without_prefill=frozenset({"m"})),
    )
    facts = WorkerFacts("d", Stage.DECODE, "m", "r", Geometry(1, 16, 8, 1), "host:1", 4096, 100, frozenset())
    worker = Worker(facts)
    worker.credit(1, 10_000, 0)
    desk.join(worker, lambda message: None)
    parties = []
    for number in range(2):
        ticket = desk.routed(Ticket(ONLINE, number, f"q{number}", "m", Stage.PREFILL, 100))
        assert (ticket.stage, ticket.num_tokens) == (Stage.DECODE, 101)
        parties.append(Party(desk, ticket))
        desk.register(ticket.request_id, parties[-1])
        desk.enqueue(ticket)
    assert [party.worker for party in parties] == ["d", None]
    (placed,) = parties[0].seen
    assert isinstance(placed, ev.Placed)
    assert placed.is_local
    now = 7.0
    desk.deliver("q0", ev.Completed("d", 1, FinishReason.LENGTH))
    desk.credit(worker, pb.WorkerCredit(num_slots=1, num_free_blocks=10_000, num_leases_seen=1))
    assert parties[1].worker == "d"
    outlook = desk.outlook(Newcomer("m", ONLINE, "", 100, 1000.0))
    assert outlook.position == 1
    assert outlook.wait_s == pytest.approx(7.0)
    assert [one.context_tokens for pair in desk.workers.pairs("m") for one in pair] == [4096, 4096]


def test_a_model_with_prefill_workers_does_not_live_without_them() -> None:
    room = Room(1)
    assert room.desk.routed(Ticket(ONLINE, 1, "q", "m", Stage.PREFILL, 1)).stage is Stage.PREFILL
    assert len(list(room.desk.workers.pairs("m"))) == 1
