"""The scheduler under any order of events: no block is lost or written by two, the oldest goes on, all finish."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from meshfire.errors import PromptTooLong, QueueFull
from meshfire.kv.block_pool import BlockPool
from meshfire.sched.parts import ChunkBudget, StepPart, next_parts
from meshfire.sched.policy import Scheduler
from meshfire.sched.sequence import Sequence, SequenceState
from tests.unit.sched.naming import P, sequence_of

#: two values only, so that many sequences begin alike
TOKEN_IDS = st.lists(st.integers(0, 1), min_size=1, max_size=4 * P)


class Engine(RuleBasedStateMachine):
    """Does with a scheduler what an engine does, in any order that an engine could."""

    @initialize(num_blocks=st.integers(2, 12), max_active=st.integers(1, 5), chunk=st.integers(1, 9))
    def begin(self, num_blocks: int, max_active: int, chunk: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(self.pool, block_tokens=P, max_active=max_active, max_waiting=4)
        self.budget = ChunkBudget(beside_others=chunk, alone=2 * chunk)
        self.live: list[Sequence] = []
        self.arrivals: list[Sequence] = []
        #: in order of their last admission
        self.admissions: list[Sequence] = []

    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=4 * P), kv_comes=st.booleans(), scored=st.booleans()
    )
    def arrive(self, token_ids: list[int], kv_comes: bool, scored: bool) -> None:
        sequence = sequence_of(token_ids, kv_comes=kv_comes)
        sequence.wanted_from = 0 if scored and not kv_comes else None
        try:
            self.scheduler.add(sequence)
        except (QueueFull, PromptTooLong):
            return
        self.live.append(sequence)
        self.arrivals.append(sequence)

    @rule()
    def admit(self) -> None:
        waiting = [one for one in self.arrivals if one.state is SequenceState.WAITING]
        admitted = self.scheduler.admit()
        self.admissions = [one for one in self.admissions if one not in admitted] + admitted
        assert admitted == waiting[: len(admitted)], "first come, first served, preempted or not"

    @rule(which=st.integers(0, 4))
    def prepared(self, which: int) -> None:
        preparing = [one for one in self.live if one.state is SequenceState.PREPARING]
        if which < len(preparing):
            begin = self.scheduler.arrived if preparing[which].kv_comes else self.scheduler.compute
            begin(preparing[which])

    @precondition(lambda self: self.scheduler.running)
    @rule(token_id=st.integers(0, 1), fails=st.booleans())
    def step(self, token_id: int, fails: bool) -> None:
        oldest_active = next(one for one in self.admissions if one.active)
        preempted = self.scheduler.grow()
        assert oldest_active not in preempted
        running = self.scheduler.running
        if not running:  # the oldest one is still being prepared
            return
        oldest = running[0]
        parts = next_parts(self.scheduler, self.budget)
        self._check_budget(parts)
        if fails:
            return
        progress = oldest.num_computed_tokens, oldest.num_tokens
        for part in parts:
            self._compute(part, token_id)
        if oldest.state is SequenceState.RUNNING:
            assert (oldest.num_computed_tokens, oldest.num_tokens) > progress, "the oldest goes on"

    @rule(which=st.integers(0, 8))
    def cancel(self, which: int) -> None:
        if which < len(self.live):
            self._end(self.live[which])

    @invariant()
    def no_block_is_lost_and_none_is_written_by_two(self) -> None:
        self.pool.check()
        used = {block for one in self.live for block in one.block_table}
        assert self.pool.num_blocks - self.pool.num_free == len(used)
        to_write: list[int] = []
        for one in self.live:
            assert len(set(one.block_table)) == len(one.block_table)
            assert one.active or not one.block_table
            if one.state is SequenceState.RUNNING:
                to_write += one.block_table[one.num_computed_tokens // P :]
            elif one.active:
                to_write += one.block_table[one.num_held_blocks :]
        assert len(set(to_write)) == len(to_write), "two sequences would write to one block"

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for one in list(self.live):
            self._end(one)
        self.pool.check()
        assert self.pool.num_free == self.pool.num_blocks

    def _check_budget(self, parts: list[StepPart]) -> None:
        chunks = [part.stop - part.start for part in parts if part.sequence.num_new_tokens > 1]
        outputs = [part for part in parts if part.sequence.num_new_tokens <= 1]
        assert sum(chunks) <= (self.budget.beside_others if outputs else self.budget.alone)
        assert {id(one.sequence) for one in outputs} == {
            id(one) for one in self.scheduler.running if one.num_new_tokens <= 1
        }, "every output gets its token in every step"
        assert parts, "somebody runs"

    def _compute(self, part: StepPart, token_id: int) -> None:
        sequence = part.sequence
        assert part.start == sequence.num_computed_tokens
        if sequence.wanted_from is not None:
            assert part.start <= sequence.wanted_from, "no wanted state was skipped"
            sequence.wanted_from = part.stop
        if part.is_last:
            sequence.append(token_id)
        self.scheduler.computed(sequence, part.stop)
        if sequence.num_tokens >= self.pool.num_blocks * P:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.live.remove(sequence)
        self.arrivals.remove(sequence)
        self.admissions = [one for one in self.admissions if one is not sequence]


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


@settings(max_examples=100, deadline=None)
@given(
    num_blocks=st.integers(3, 10),
    max_active=st.integers(1, 5),
    chunk=st.integers(1, 9),
    wishes=st.lists(st.tuples(st.integers(1, 10), st.integers(1, 12)), min_size=1, max_size=8),
)
def test_every_sequence_finishes_though_it_is_preempted_and_computed_anew(
    num_blocks: int, max_active: int, chunk: int, wishes: list[tuple[int, int]]
) -> None:
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(pool, block_tokens=P, max_active=max_active, max_waiting=100)
    capacity = num_blocks * P
    wanted: dict[Sequence, int] = {}
    for name, (num_prompt, num_output) in enumerate(wishes):
        sequence = sequence_of([name] * min(num_prompt, capacity - 1))
        wanted[sequence] = min(sequence.num_tokens + num_output, capacity)
        scheduler.add(sequence)
    left = set(wanted)
    for _ in range(4000):
        for sequence in scheduler.admit():
            scheduler.compute(sequence)
        scheduler.grow()
        for part in next_parts(scheduler, ChunkBudget(chunk, chunk)):
            if part.is_last:
                part.sequence.append(7)
            scheduler.computed(part.sequence, part.stop)
            if part.sequence.num_tokens >= wanted[part.sequence]:
                scheduler.remove(part.sequence)
                left.discard(part.sequence)
        if not left:
            break
    assert not left
    pool.check()
    assert pool.num_free == num_blocks
