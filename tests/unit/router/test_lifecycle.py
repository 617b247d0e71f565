"""The request's state machine against a world of workers that die, repeat themselves and speak late."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfire.errors import Cancelled, DataLoss, DeadlineExceeded, NonFiniteValue, ShardUnavailable, WorkerLost
from services.router import lifecycle_events as ev
from services.router.lifecycle import ENDED, Life, Limits, Phase, apply, begin
from services.router.lifecycle_events import Stage
from services.router.output import FinishReason, Logprobs, OutputToken

AWAY = ShardUnavailable("away")
LOST = WorkerLost("lost")
END_ID = 7


def tokens(start: int, stop: int) -> tuple[OutputToken, ...]:
    """Every index of the output has a token id of its own, so that a doubled or swapped one is seen."""
    return tuple(OutputToken(1000 + index) for index in range(start, stop))


def offer(epoch: int) -> ev.Offer:
    return ev.Offer(f"kv-{epoch}", 10, 0, 100, 30_000)


@dataclass
class Lease:
    """What one worker has in hand. It may work on long after the router gave it up."""

    worker: str
    epoch: int
    stage: Stage
    #: next index of the output, for decode
    index: int


@dataclass
class World:
    """Does what actions ask for, as active.py does, and keeps the books that the properties are about."""

    num_output: int
    life: Life = field(init=False)
    delivered: list[int] = field(default_factory=list)
    endings: list[ev.Ending] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    #: (worker, epoch) that hold something and neither let go nor were told to
    held: set[tuple[str, int]] = field(default_factory=set)
    queued: Stage | None = None
    num_retries_pending: int = 0

    def __post_init__(self) -> None:
        self.life, actions = begin(Limits(self.num_output))
        self._do(actions)

    def send(self, event: ev.Event) -> None:
        was_over = self.life.phase in ENDED
        self.life, actions = apply(self.life, event)
        assert not (was_over and actions), "a life that is over asks for nothing"
        self._do(actions)

    def _do(self, actions: tuple[ev.Action, ...]) -> None:
        for action in actions:
            match action:
                case ev.Enqueue(stage=stage):
                    assert self.queued is None, "one place in one queue"
                    self.queued = stage
                case ev.Dequeue():
                    assert self.queued is not None
                    self.queued = None
                case ev.LeasePrefill(worker_id=worker, epoch=epoch):
                    self._lease(worker, epoch, Stage.PREFILL)
                case ev.GrantKv(worker_id=worker, epoch=epoch):
                    assert (worker, epoch) in self.held, "KV is granted by who still holds it"
                case ev.LeaseDecode(worker_id=worker, epoch=epoch):
                    self._lease(worker, epoch, Stage.DECODE)
                case ev.CancelLease(worker_id=worker, epoch=epoch):
                    self.held.discard((worker, epoch))
                case ev.Deliver(tokens=fresh):
                    self.delivered.extend(token.token_id for token in fresh)
                case ev.End(ending=ending):
                    self.endings.append(ending)

    def _lease(self, worker: str, epoch: int, stage: Stage) -> None:
        assert all(lease.epoch <= epoch for lease in self.leases), "epochs only grow"
        self.leases.append(Lease(worker, epoch, stage, len(self.delivered)))
        self.held.add((worker, epoch))

    # --- what may happen

    def place(self, worker: str) -> None:
        if self.queued is not None:
            stage, self.queued = self.queued, None
            # A decode worker takes the prompt as well where the name says so.
            is_local = stage is Stage.PREFILL and worker == "local"
            self.send(ev.Placed(f"{stage.value}-{worker}", is_local=is_local))

    def work(self, lease: Lease, num_tokens: int) -> None:
        """A worker goes on with a lease, current or not."""
        if lease.stage is Stage.PREFILL:
            self.send(ev.Offered(lease.worker, lease.epoch, offer(lease.epoch)))
            return
        stop = min(lease.index + num_tokens, self.num_output)
        current = self.life.epoch == lease.epoch
        self.send(ev.Progressed(lease.worker, lease.epoch, lease.index, self._said(lease, lease.index, stop)))
        lease.index = stop
        if current:  # the KV was read: its owner is free
            self.held = {one for one in self.held if not (one[1] == lease.epoch and one[0] != lease.worker)}
        if stop == self.num_output:
            self.held.discard((lease.worker, lease.epoch))
            self.send(ev.Completed(lease.worker, lease.epoch, FinishReason.LENGTH))

    def repeat(self, lease: Lease, back: int) -> None:
        """A message comes twice, or late."""
        if lease.stage is Stage.DECODE:
            start = max(0, lease.index - back)
            self.send(ev.Progressed(lease.worker, lease.epoch, start, self._said(lease, start, lease.index)))

    def _said(self, lease: Lease, start: int, stop: int) -> tuple[OutputToken, ...]:
        """A lease that was given up speaks nonsense: nobody must listen."""
        return tokens(start, stop) if lease.epoch == self.life.epoch else (OutputToken(-1),) * (stop - start)

    def fail(self, lease: Lease) -> None:
        self.held.discard((lease.worker, lease.epoch))
        self.send(ev.LeaseFailed(lease.worker, lease.epoch, AWAY, retryable=True))

    def lose(self, worker: str) -> None:
        self.held = {one for one in self.held if one[0] != worker}
        self.send(ev.WorkerGone(worker, LOST))

    def advance(self, worker: str) -> None:
        """The next step of a world without failures."""
        if self.life.phase is Phase.PAUSED:
            self.send(ev.RetryDue(self.life.epoch))
        elif self.queued is not None:
            self.place(worker)
        else:
            self.work(self.leases[-1], 1)

    def run_out(self) -> None:
        """Nothing fails any more: the request must come to its end."""
        for _ in range(3 * self.num_output + 10):
            if self.life.phase in ENDED:
                return
            self.advance("z")
        raise AssertionError(f"still {self.life.phase} in epoch {self.life.epoch}")


@dataclass(frozen=True)
class Trouble:
    """After some steps without any: what goes wrong, with which of the leases (0 = the newest), and how much of it."""

    calm_steps: int
    kind: str
    lease: int
    amount: int


TROUBLES = st.builds(
    Trouble,
    st.integers(0, 6),
    st.sampled_from(["work", "repeat", "repeat", "fail", "lose", "expire", "preempt"]),
    st.sampled_from([0, 0, 0, 1, 2, 5]),
    st.integers(1, 4),
)


def bring(world: World, trouble: Trouble) -> None:
    lease = world.leases[-1 - trouble.lease % len(world.leases)] if world.leases else None
    if trouble.kind == "expire":
        world.send(ev.OfferExpired(max(1, world.life.epoch - trouble.lease)))
    elif trouble.kind == "preempt":
        world.send(ev.Preempted())
    elif lease is None:
        world.send(ev.RetryDue(trouble.amount))
    elif trouble.kind == "work":
        world.work(lease, trouble.amount)
    elif trouble.kind == "repeat":
        world.repeat(lease, trouble.amount)
    elif trouble.kind == "fail":
        world.fail(lease)
    else:
        world.lose(lease.worker)


@given(st.lists(TROUBLES, max_size=8), st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_whatever_fails_each_token_comes_once_in_order_and_the_end_once(
    troubles: list[Trouble], num_output: int
) -> None:
    world = World(num_output)
    for number, trouble in enumerate(troubles):
        for _ in range(trouble.calm_steps):
            world.advance(("a", "local", "a", "b")[number % 4])
        bring(world, trouble)
        assert world.delivered == [1000 + index for index in range(len(world.delivered))]
        assert world.life.num_tokens == len(world.delivered)
    world.run_out()
    assert world.delivered == [1000 + index for index in range(num_output)]
    assert [ending.reason for ending in world.endings] == [FinishReason.LENGTH]
    assert world.held == set(), "whoever held something let go or was told to"
    assert world.queued is None


def decoding(limits: Limits | None = None) -> Life:
    """A life whose first epoch decodes at worker d, from the KV of worker p."""
    life, _ = begin(limits or Limits(100, 0, frozenset({END_ID})))
    for event in (ev.Placed("p"), ev.Offered("p", 1, offer(1)), ev.Placed("d")):
        life, _ = apply(life, event)
    assert life.phase is Phase.DECODING
    return life


def test_the_grant_goes_out_before_the_decode_lease() -> None:
    life, _ = begin(Limits(5))
    life, _ = apply(life, ev.Placed("p"))
    life, _ = apply(life, ev.Offered("p", 1, offer(1)))
    _, actions = apply(life, ev.Placed("d"))
    assert [type(action) for action in actions] == [ev.GrantKv, ev.LeaseDecode]


def test_the_same_workers_words_of_an_older_epoch_are_dropped() -> None:
    life, _ = apply(decoding(), ev.LeaseFailed("d", 1, AWAY, retryable=True))
    for event in (ev.Placed("p"), ev.Offered("p", 2, offer(2)), ev.Placed("d")):
        life, _ = apply(life, event)
    assert (life.phase, life.epoch) == (Phase.DECODING, 2)
    for stale in (
        ev.Progressed("d", 1, 0, tokens(0, 2)),
        ev.Completed("d", 1, FinishReason.STOP),
        ev.LeaseFailed("d", 1, AWAY, retryable=False),
        ev.Offered("p", 1, offer(1)),
        ev.OfferExpired(1),
        ev.RetryDue(2),
        ev.WorkerGone("somebody else", LOST),
    ):
        assert apply(life, stale) == (life, ())


def test_an_end_token_is_not_delivered_and_its_finish_survives_the_workers_death() -> None:
    life, actions = apply(decoding(), ev.Progressed("d", 1, 0, (OutputToken(1), OutputToken(END_ID), OutputToken(2))))
    assert actions == (ev.Deliver((OutputToken(1),)),)
    life, actions = apply(life, ev.WorkerGone("d", LOST))
    assert life.phase is Phase.FINISHED
    assert actions == (ev.End(ev.Ending(FinishReason.STOP, END_ID)),)


def test_an_end_token_before_min_tokens_is_a_token_like_any_other() -> None:
    life = decoding(Limits(100, 2, frozenset({END_ID})))
    _, actions = apply(life, ev.Progressed("d", 1, 0, (OutputToken(END_ID), OutputToken(1), OutputToken(END_ID))))
    assert actions == (ev.Deliver((OutputToken(END_ID), OutputToken(1))),)


def test_a_worker_that_dies_after_the_last_token_is_not_replaced() -> None:
    life, _ = apply(decoding(Limits(2)), ev.Progressed("d", 1, 0, tokens(0, 2)))
    life, actions = apply(life, ev.WorkerGone("d", LOST))
    assert (life.phase, actions) == (Phase.FINISHED, (ev.End(ev.Ending(FinishReason.LENGTH)),))


def test_a_hole_in_the_tokens_abandons_the_epoch() -> None:
    life, actions = apply(decoding(), ev.Progressed("d", 1, 3, tokens(3, 5)))
    assert (life.epoch, life.num_tokens, life.phase) == (2, 0, Phase.QUEUED_PREFILL)
    assert isinstance(life.last_error, DataLoss)
    assert actions == (ev.CancelLease("d", 1), ev.CancelLease("p", 1), ev.Enqueue(Stage.PREFILL, 2))


def test_the_prefill_workers_death_does_not_matter_once_its_kv_was_read() -> None:
    before = decoding()
    assert before.holders == {"p", "d"}
    life, _ = apply(before, ev.Progressed("d", 1, 0, tokens(0, 1)))
    assert apply(life, ev.WorkerGone("p", LOST)) == (life, ())
    abandoned, actions = apply(before, ev.WorkerGone("p", LOST))
    assert abandoned.epoch == 2
    assert ev.CancelLease("d", 1) in actions


def test_the_second_failure_in_a_row_waits_and_progress_forgives() -> None:
    life, actions = apply(decoding(), ev.LeaseFailed("d", 1, AWAY, retryable=True))
    assert actions[-1] == ev.Enqueue(Stage.PREFILL, 2)
    life, _ = apply(life, ev.Placed("p"))
    life, actions = apply(life, ev.LeaseFailed("p", 2, AWAY, retryable=True))
    assert (life.phase, actions) == (Phase.PAUSED, (ev.RetryAfter(3, 2),))
    life, _ = apply(life, ev.RetryDue(3))
    for event in (ev.Placed("p"), ev.Offered("p", 3, offer(3)), ev.Placed("d"), ev.Progressed("d", 3, 0, tokens(0, 1))):
        life, _ = apply(life, event)
    assert (life.failures_in_row, life.num_failures, life.avoid) == (0, 2, None)


def test_a_failure_that_nothing_mends_ends_the_request_and_frees_the_other_side() -> None:
    error = NonFiniteValue("not finite")
    life, actions = apply(decoding(), ev.LeaseFailed("d", 1, error, retryable=False))
    assert life.phase is Phase.FAILED
    assert actions == (ev.CancelLease("p", 1), ev.End(ev.Ending(error=error)))


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_client_that_leaves_frees_whatever_is_held(num_steps: int) -> None:
    life, _ = begin(Limits(5))
    steps = [ev.Placed("p"), ev.Offered("p", 1, offer(1)), ev.Placed("d")][:num_steps]
    for event in steps:
        life, _ = apply(life, event)
    gone = ev.ClientGone(Cancelled("gone"))
    over, actions = apply(life, gone)
    assert over.phase is Phase.CANCELLED
    assert {action.worker_id for action in actions if isinstance(action, ev.CancelLease)} == life.holders
    assert (ev.Dequeue() in actions) == (num_steps in (0, 2))
    assert apply(over, gone) == (over, ())


def test_the_deadline_is_told_with_the_last_failure_if_there_was_one() -> None:
    late = ev.DeadlinePassed(DeadlineExceeded("late"))
    _, actions = apply(decoding(), late)
    assert actions[-1] == ev.End(ev.Ending(error=late.error))
    failed, _ = apply(decoding(), ev.LeaseFailed("d", 1, AWAY, retryable=True))
    _, actions = apply(failed, late)
    assert actions[-1] == ev.End(ev.Ending(error=AWAY))


class TestLocalPrompts:
    """A decode worker computes the prompt itself."""

    def test_one_lease_does_it_all_and_what_was_cached_is_noted(self) -> None:
        life, _ = begin(Limits(2))
        life, actions = apply(life, ev.Placed("d", "cache", 32, is_local=True))
        assert actions == (ev.LeaseDecode("d", 1, None, "cache", 32),)
        assert life.holders == {"d"}
        life, actions = apply(life, ev.PromptComputed("d", 1, 32))
        assert actions == (ev.NoteCached(32),)
        life, _ = apply(life, ev.Progressed("d", 1, 0, tokens(0, 2)))
        life, actions = apply(life, ev.Completed("d", 1, FinishReason.LENGTH))
        assert life.phase is Phase.FINISHED

    def test_its_failure_sends_the_prompt_back_to_the_queue(self) -> None:
        life, _ = begin(Limits(5))
        life, _ = apply(life, ev.Placed("d", is_local=True))
        life, actions = apply(life, ev.LeaseFailed("d", 1, AWAY, retryable=True))
        assert (life.phase, actions) == (Phase.QUEUED_PREFILL, (ev.Enqueue(Stage.PREFILL, 2),))

    @pytest.mark.parametrize(
        "event",
        [
            ev.PromptComputed("d", 1, 0),
            ev.Progressed("d", 1, 0, tokens(0, 1)),
            ev.Completed("d", 1, FinishReason.LENGTH),
        ],
    )
    def test_a_worker_that_leaves_scores_out_is_replaced(self, event: ev.Event) -> None:
        life, _ = begin(Limits(5, num_scored=9))
        life, _ = apply(life, ev.Placed("d", is_local=True))
        life, _ = apply(life, event)
        assert (life.epoch, life.phase, life.avoid) == (2, Phase.QUEUED_PREFILL, "d")
        assert isinstance(life.last_error, DataLoss)

    def test_scores_come_from_the_decode_worker(self) -> None:
        life, _ = begin(Limits(0, num_scored=2))
        life, _ = apply(life, ev.Placed("d", is_local=True))
        told = (Logprobs(-1.0), Logprobs(-2.0))
        life, actions = apply(life, ev.PromptScored("d", 1, 1, told))
        assert actions == (ev.KeepScores(told),)
        life, _ = apply(life, ev.PromptComputed("d", 1, 0))
        life, _ = apply(life, ev.Completed("d", 1, FinishReason.LENGTH))
        assert life.phase is Phase.FINISHED

    def test_a_word_that_does_not_fit_is_old_news(self) -> None:
        life = decoding()
        assert apply(life, ev.PromptComputed("d", 1, 3)) == (life, ())
        life, _ = begin(Limits(5))
        life, _ = apply(life, ev.Placed("d", is_local=True))
        assert apply(life, ev.PromptComputed("d", 2, 3)) == (life, ())
        assert apply(life, ev.PromptComputed("other", 1, 3)) == (life, ())
