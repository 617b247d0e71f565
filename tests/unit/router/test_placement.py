"""Credits and the choice of a worker, without a socket."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.router.lifecycle_events import Stage
from services.router.placement import Choice, Crowd, Placement, Reason, Wait, goes_local
from services.router.placement import choose as place
from services.router.tickets import Priority, Ticket
from services.router.workers import Geometry, Worker, WorkerFacts


def worker(
    worker_id: str, stage: Stage = Stage.PREFILL, slots: int = 4, blocks: int = 100, revision: str = "r"
) -> Worker:
    facts = WorkerFacts(worker_id, stage, "m", revision, Geometry(1, 16, 8, 1), "host:1", 512, 100, frozenset())
    one = Worker(facts)
    one.credit(slots, blocks, 0)
    return one


def ticket(
    number: int = 1, priority: Priority = Priority.ONLINE, stage: Stage = Stage.PREFILL, **more: object
) -> Ticket:
    return replace(Ticket(priority, number, f"q{number}", "m", stage, 32), **more)


def choose(wanted: Ticket, crowd: Crowd) -> Worker | Wait:
    """Who gets it, without the reason."""
    choice: Choice = place(wanted, crowd)
    return choice.worker if isinstance(choice, Placement) else choice


def prefill_crowd(*workers: Worker) -> Crowd:
    return Crowd(workers, [worker("reader", Stage.DECODE)])


class TestCredit:
    def test_leases_that_a_credit_has_not_counted_are_taken_off_its_room(self) -> None:
        one = worker("a", slots=3, blocks=10)
        one.lease_sent(2)
        one.lease_sent(3)
        assert (one.free_slots, one.free_blocks) == (1, 5)
        one.credit(2, 8, 1)  # it has seen the first lease only
        assert (one.free_slots, one.free_blocks) == (1, 5)
        one.credit(1, 5, 2)
        assert (one.free_slots, one.free_blocks) == (1, 5)

    @given(st.lists(st.booleans(), max_size=30), st.data())
    def test_a_worker_is_never_sent_more_than_it_has_room_for(self, steps: list[bool], data: st.DataObject) -> None:
        """Oracle: a worker with 4 slots that counts late; what is in flight plus what it holds stays within."""
        one, held, in_flight, num_seen = worker("a", slots=4), 0, 0, 0
        for lease in steps:
            if lease and one.free_slots > 0:
                one.lease_sent(1)
                in_flight += 1
            else:
                arrived = data.draw(st.integers(0, in_flight))
                in_flight, held, num_seen = in_flight - arrived, held + arrived, num_seen + arrived
                held -= data.draw(st.integers(0, held))
                one.credit(4 - held, 100, num_seen)
            assert held + in_flight <= 4

    def test_an_idle_worker_is_asked_even_if_it_seems_too_small(self) -> None:
        one = worker("a", blocks=1)
        assert one.has_room(1000)
        one.held.add("q")
        assert not one.has_room(1000)
        assert one.has_room(16)


class TestChoice:
    def test_a_session_stays_at_its_worker_and_only_there(self) -> None:
        workers = [worker(name) for name in "abcd"]
        chosen = {key: choose(ticket(session_key=key), prefill_crowd(*workers)) for key in map(str, range(40))}
        assert len({one.facts.worker_id for one in chosen.values() if isinstance(one, Worker)}) == 4
        for key, one in chosen.items():
            assert choose(ticket(session_key=key), prefill_crowd(*reversed(workers))) is one

    def test_a_worker_that_leaves_moves_only_its_own_sessions(self) -> None:
        workers = [worker(name) for name in "abcd"]
        for key in map(str, range(40)):
            before = choose(ticket(session_key=key), prefill_crowd(*workers))
            after = choose(ticket(session_key=key), prefill_crowd(*workers[1:]))
            assert before is after or before is workers[0]

    def test_a_session_leaves_its_worker_when_that_has_no_room_and_another_has(self) -> None:
        workers = [worker(name) for name in "ab"]
        home = choose(ticket(session_key="k"), prefill_crowd(*workers))
        assert isinstance(home, Worker)
        home.credit(0, 100, 0)
        (other,) = [one for one in workers if one is not home]
        assert choose(ticket(session_key="k"), prefill_crowd(*workers)) is other

    def test_between_equals_the_one_that_got_least_so_far_gets_it(self) -> None:
        workers = [worker(name) for name in "abc"]
        chosen = []
        for number in range(6):
            one = choose(ticket(number), prefill_crowd(*workers))
            assert isinstance(one, Worker)
            one.lease_sent(1, 0)
            one.credit(4, 100, one.num_sent, 0)
            chosen.append(one.facts.worker_id)
        assert sorted(chosen) == ["a", "a", "b", "b", "c", "c"]

    def test_a_worker_that_just_failed_is_the_last_choice(self) -> None:
        failed, other = worker("a", slots=9), worker("b", slots=1)
        assert choose(ticket(avoid="a"), prefill_crowd(failed, other)) is other
        other.credit(0, 0, 0)
        assert choose(ticket(avoid="a"), prefill_crowd(failed, other)) is failed

    def test_kv_goes_only_to_a_reader_of_the_same_revision_and_geometry(self) -> None:
        owner = worker("p")
        old, same = worker("d1", Stage.DECODE, slots=9, revision="old"), worker("d2", Stage.DECODE)
        wanted = ticket(stage=Stage.DECODE, kv_owner=owner.facts)
        assert choose(wanted, Crowd([owner], [old, same])) is same
        assert choose(wanted, Crowd([owner], [old])) is Wait.NO_SLOT

    def test_a_prompt_is_not_computed_where_no_decode_worker_could_read_it(self) -> None:
        odd, even = worker("p1", slots=9, revision="odd"), worker("p2")
        assert choose(ticket(), prefill_crowd(odd, even)) is even
        assert choose(ticket(), Crowd([odd], [])) is odd

    def test_a_lease_that_waits_for_blocks_is_told_apart_from_one_that_waits_for_a_slot(self) -> None:
        small = worker("a", blocks=1)
        small.held.add("somebody")
        assert choose(ticket(), prefill_crowd(small)) is Wait.NO_BLOCKS
        assert choose(ticket(), prefill_crowd(worker("b", slots=0))) is Wait.NO_SLOT


HASHES = tuple(bytes([number]) * 16 for number in range(6))


class TestPrefixes:
    def test_a_prompt_goes_where_its_prefix_is(self) -> None:
        cold, warm = worker("a", slots=9), worker("b", slots=1)
        warm.prefixes.apply(stored=HASHES[:4])
        choice = place(ticket(num_tokens=100, block_hashes=HASHES), prefill_crowd(cold, warm))
        assert choice == Placement(warm, Reason.CACHE, 64)

    def test_unless_that_worker_has_too_much_to_do(self) -> None:
        cold, warm = worker("a"), worker("b")
        warm.prefixes.apply(stored=HASHES[:4])
        warm.credit(4, 100, 0, 64 * 2 + 1)  # a token of its work weighs half a token of ours
        choice = place(ticket(num_tokens=100, block_hashes=HASHES), prefill_crowd(cold, warm))
        assert choice == Placement(cold, Reason.LOAD, 0)

    def test_what_we_sent_counts_until_the_worker_has_counted_it(self) -> None:
        one, other = worker("a"), worker("b")
        one.lease_sent(1, 500)
        assert choose(ticket(), prefill_crowd(one, other)) is other
        one.credit(4, 100, 1, 0)
        other.credit(4, 100, 0, 900)
        assert choose(ticket(), prefill_crowd(one, other)) is one

    def test_a_home_is_left_only_when_it_is_far_behind_the_others(self) -> None:
        workers = [worker(name) for name in "abc"]
        home = choose(ticket(session_key="k"), prefill_crowd(*workers))
        assert isinstance(home, Worker)
        home.credit(4, 100, 0, 20_200)
        for one in workers:
            if one is not home:
                one.credit(4, 100, 0, 10_001)
        assert place(ticket(session_key="k"), prefill_crowd(*workers)) == Placement(home, Reason.SESSION)
        home.credit(4, 100, 0, 20_300)
        assert choose(ticket(session_key="k"), prefill_crowd(*workers)) is not home

    def test_the_last_token_is_never_expected_to_be_cached(self) -> None:
        warm = worker("a")
        warm.prefixes.apply(stored=HASHES)
        choice = place(ticket(num_tokens=96, block_hashes=HASHES), prefill_crowd(warm, worker("b")))
        assert isinstance(choice, Placement)
        assert choice.num_cached == 95

    @given(st.integers(0, 6), st.integers(0, 6))
    def test_events_come_and_go(self, num_stored: int, num_removed: int) -> None:
        view = worker("a").prefixes
        view.apply(stored=HASHES[:num_stored])
        view.apply(removed=HASHES[6 - num_removed :])
        assert view.num_found(HASHES) == min(num_stored, 6 - num_removed)
        view.apply(reset=True, stored=HASHES[:1])
        assert view.num_found(HASHES) == len(view) == 1


def holding(one: Worker, num_blocks: int) -> Worker:
    """Its prefix cache holds so many blocks of HASHES."""
    one.prefixes.apply(stored=HASHES[:num_blocks])
    return one


class TestLocalPrompts:
    """`ticket(num_tokens=100)`: six full blocks of 16 and a piece."""

    def wanted(self, **more: object) -> Ticket:
        return ticket(num_tokens=100, block_hashes=HASHES, **more)

    def test_a_prompt_stays_where_little_of_it_lacks_and_there_is_room(self) -> None:
        owner = worker("p")
        cold, warm = worker("d1", Stage.DECODE), holding(worker("d2", Stage.DECODE), 6)
        assert goes_local(self.wanted(), Crowd([owner], [cold, warm]), 4)
        assert not goes_local(self.wanted(), Crowd([owner], [cold, warm]), 3)
        assert not goes_local(self.wanted(), Crowd([owner], [cold]), 99)
        assert goes_local(self.wanted(), Crowd([owner], [cold]), 100)
        warm.credit(0, 100, 0)
        assert not goes_local(self.wanted(), Crowd([owner], [cold, warm]), 4), "prefill is not held up for it"

    def test_nothing_is_local_at_0_and_without_prefill_workers_it_waits_for_decode(self) -> None:
        warm = holding(worker("d", Stage.DECODE), 6)
        assert not goes_local(self.wanted(), Crowd([worker("p")], [warm]), 0)
        assert not goes_local(self.wanted(), Crowd([], [warm]), 0)
        warm.credit(0, 0, 0)
        assert goes_local(self.wanted(), Crowd([], [warm]), 1000)
        assert goes_local(self.wanted(), Crowd([], []), 1000)

    def test_it_goes_where_least_is_to_compute_and_then_where_most_is_free(self) -> None:
        local = self.wanted(stage=Stage.DECODE, local_max_tokens=1000)
        one, two = worker("d1", Stage.DECODE, slots=3), worker("d2", Stage.DECODE, slots=2)
        choice = place(local, Crowd([], [one, two]))
        assert (choice.worker, choice.reason) == (one, Reason.LOAD)
        holding(two, 3)
        choice = place(local, Crowd([], [one, two]))
        assert (choice.worker, choice.reason, choice.num_cached) == (two, Reason.CACHE, 48)
        two.credit(2, 100, 0, 500)
        assert choose(local, Crowd([], [one, two])) is one, "much waits to be computed there"

    def test_blocks_that_are_gone_by_now_leave_any_worker_as_good(self) -> None:
        local = self.wanted(stage=Stage.DECODE, local_max_tokens=4)
        one = worker("d1", Stage.DECODE)
        assert choose(local, Crowd([worker("p")], [one])) is one

    def test_an_output_goes_on_at_the_revision_that_began_it(self) -> None:
        local = self.wanted(stage=Stage.DECODE, local_max_tokens=1000, revision="new")
        old, new = worker("d1", Stage.DECODE, slots=9, revision="old"), worker("d2", Stage.DECODE, revision="new")
        assert choose(local, Crowd([], [old, new])) is new
