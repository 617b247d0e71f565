"""One request under way: does what its life (lifecycle.py) asks for, and keeps its tokens for whoever reads them.

Owns the tokens so far, the timers and the queue's time. Decides nothing: every decision is `lifecycle.apply`'s.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from services.router import leases
from services.router import lifecycle_events as ev
from services.router.desk import Desk
from services.router.lifecycle import ENDED, Life, Limits, apply, begin
from services.router.lifecycle_events import Stage
from services.router.output import Logprobs, OutputToken
from services.router.tickets import Ticket
from services.router.work import Work
from services.router.workers import WorkerFacts

_FIRST_PAUSE_S = 0.05


@dataclass(frozen=True)
class Timing:
    """How long things may wait, in seconds."""

    offer_margin_s: float
    offer_timeout_s: float
    retry_pause_max_s: float


class Watcher(Protocol):
    """Who records what happens, for traces and metrics."""

    def queued(self, stage: Stage, epoch: int) -> None:
        """A lease waits."""

    def placed(self, stage: Stage, worker_id: str, wait_s: float) -> None:
        """It was leased."""

    def withdrawn(self) -> None:
        """It waits no more, without having been leased."""

    def failed_over(self, life: Life) -> None:
        """The next epoch begins because of a failure."""


class ActiveRequest:
    """Events in, messages to workers out; tokens and the end are read with `outcome()`."""

    def __init__(self, work: Work, desk: Desk, timing: Timing, watcher: Watcher) -> None:
        self.work = work
        self.tokens: list[int] = []
        #: of the prompt's tokens from the second on, if asked for
        self.prompt_logprobs: list[Logprobs] = []
        #: prompt tokens that the first worker that computed it had already; None = nobody has computed it yet
        self.num_cached: int | None = None
        self.last_offer: ev.Offer | None = None
        #: the last workers that had it, by stage
        self.workers: dict[Stage, WorkerFacts] = {}
        #: how the prompt was placed the first time
        self.first_prefill: ev.LeasePrefill | ev.LeaseDecode | None = None
        self.ending: ev.Ending | None = None
        self.queue_s = 0.0
        self._desk = desk
        self._timing = timing
        self._watcher = watcher
        self._loop = asyncio.get_running_loop()
        self._unread: list[OutputToken] = []
        self._wake = asyncio.Event()
        self._events: deque[ev.Event] = deque()
        self._busy = False
        self._ticket: Ticket | None = None
        self._queued_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        limits = Limits(work.sampling.max_tokens, work.sampling.min_tokens, work.end_ids, work.num_scored)
        self.life, self._first_actions = begin(limits)

    def start(self) -> None:
        """Wait for a prefill worker."""
        self._desk.register(self.work.request_id, self)
        self._busy = True
        self._do_all(self._first_actions)
        self._work_off()

    def handle(self, event: ev.Event) -> None:
        """Take an event. One that an action brings about waits until that action's step is done."""
        self._events.append(event)
        if not self._busy:
            self._busy = True
            self._work_off()

    async def outcome(self) -> tuple[list[OutputToken], ev.Ending | None]:
        """Tokens that nobody read yet, and the end if it has come. Waits for either."""
        await self._wake.wait()
        self._wake.clear()
        unread, self._unread = self._unread, []
        return unread, self.ending

    # --- steps

    def _work_off(self) -> None:
        try:
            while self._events:
                self._step(self._events.popleft())
        finally:
            self._busy = False

    def _step(self, event: ev.Event) -> None:
        before = self.life
        self.life, actions = apply(before, event)
        if not self.life.holds_like(before):
            self._note_holders(before.holders, self.life.holders)
        if self.life.num_failures > before.num_failures and self.life.phase not in ENDED:
            self._watcher.failed_over(self.life)
        self._do_all(actions)

    def _note_holders(self, before: frozenset[str], now: frozenset[str]) -> None:
        for worker_id in before - now:
            self._desk.hold(worker_id, self.work.request_id, holds=False)
        for worker_id in now - before:
            self._desk.hold(worker_id, self.work.request_id, holds=True)

    def _do_all(self, actions: tuple[ev.Action, ...]) -> None:
        for action in actions:
            _DO[type(action)](self, action)

    def _enqueue(self, action: ev.Enqueue) -> None:
        decode = action.stage is Stage.DECODE
        prefill_facts = self.workers.get(Stage.PREFILL)
        began_with = prefill_facts or self.workers.get(Stage.DECODE)
        ticket = Ticket(
            priority=self.work.priority,
            arrival=self.work.arrival,
            request_id=self.work.request_id,
            model=self.work.model,
            stage=action.stage,
            num_tokens=len(self.work.prompt) + len(self.tokens) + (1 if decode else 0),
            tenant=self.work.tenant,
            admitted_s=self.work.admitted_s,
            deadline_s=self.work.deadline_s,
            resumed=action.epoch > 1,
            session_key=self.work.session_key,
            block_hashes=() if decode else self.work.block_hashes,
            avoid=self.life.avoid,
            revision=began_with.revision if began_with is not None and self.tokens else None,
            kv_owner=prefill_facts if decode else None,
        )
        self._ticket = self._desk.routed(ticket)
        self._queued_s = self._loop.time()
        self._watcher.queued(self._ticket.stage, action.epoch)
        self._desk.enqueue(self._ticket)

    def _dequeue(self, _: ev.Dequeue) -> None:
        if self._ticket is not None:
            self._desk.dequeue(self._ticket)
            self._left_queue()
            self._watcher.withdrawn()

    def _left_queue(self) -> float:
        wait_s = self._loop.time() - self._queued_s
        self.queue_s += wait_s
        self._ticket = None
        return wait_s

    def _placed(self, stage: Stage, worker_id: str) -> WorkerFacts:
        self._watcher.placed(stage, worker_id, self._left_queue())
        worker = self._desk.workers.get(worker_id)
        assert worker is not None, "the desk places at workers that it has"
        self.workers[stage] = worker.facts
        return worker.facts

    def _lease_prefill(self, action: ev.LeasePrefill) -> None:
        self._placed(Stage.PREFILL, action.worker_id)
        self.first_prefill = self.first_prefill or action
        score = len(self.prompt_logprobs) < self.work.num_scored
        lease = leases.prefill_lease(self.work, action.epoch, self.tokens, self._remaining_ms(), score=score)
        self._desk.send(action.worker_id, lease)

    def _grant_kv(self, action: ev.GrantKv) -> None:
        self._cancel_timer()
        self._desk.send(action.worker_id, leases.kv_grant(action.epoch, action.offer, action.reader_id))

    def _lease_decode(self, action: ev.LeaseDecode) -> None:
        self._placed(Stage.DECODE, action.worker_id)
        if action.offer is None:
            self.workers.pop(Stage.PREFILL, None)
            self.first_prefill = self.first_prefill or action
            score = len(self.prompt_logprobs) < self.work.num_scored
            lease = leases.local_lease(self.work, action.epoch, self.tokens, self._remaining_ms(), score=score)
        else:
            kv_address = self.workers[Stage.PREFILL].address
            lease = leases.decode_lease(
                self.work, action.epoch, self.tokens, self._remaining_ms(), action.offer, kv_address
            )
        self._desk.send(action.worker_id, lease)

    def _cancel_lease(self, action: ev.CancelLease) -> None:
        self._desk.send(action.worker_id, leases.cancel(self.work.request_id, action.epoch))

    def _keep_scores(self, action: ev.KeepScores) -> None:
        self.prompt_logprobs.extend(action.logprobs)

    def _note_cached(self, action: ev.NoteCached) -> None:
        if self.num_cached is None:
            self.num_cached = action.num_tokens

    def _watch_offer(self, action: ev.WatchOffer) -> None:
        self.last_offer = self.life.offer
        if self.num_cached is None and self.life.offer is not None:
            self.num_cached = self.life.offer.num_cached_tokens
        expires_s = action.expires_ms / 1000 if action.expires_ms > 0 else self._timing.offer_timeout_s
        # Never under half of it: a margin above a short life would make every offer expire at once.
        wait_s = max(expires_s - self._timing.offer_margin_s, expires_s / 2)
        self._set_timer(wait_s, ev.OfferExpired(action.epoch))

    def _retry_after(self, action: ev.RetryAfter) -> None:
        longest = min(self._timing.retry_pause_max_s, _FIRST_PAUSE_S * 2.0 ** min(action.failures_in_row, 16))
        self._set_timer(random.uniform(longest / 2, longest), ev.RetryDue(action.epoch))

    def _deliver(self, action: ev.Deliver) -> None:
        self.tokens.extend(token.token_id for token in action.tokens)
        self._unread.extend(action.tokens)
        self._wake.set()

    def _end(self, action: ev.End) -> None:
        self.ending = action.ending
        self._cancel_timer()
        self._desk.forget(self.work.request_id)
        self._wake.set()

    # --- time

    def _remaining_ms(self) -> int:
        return max(1, round((self.work.deadline_s - self._loop.time()) * 1000))

    def _set_timer(self, wait_s: float, event: ev.Event) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(wait_s, self.handle, event)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_DO: dict[type[Any], Callable[[ActiveRequest, Any], None]] = {
    ev.Enqueue: ActiveRequest._enqueue,
    ev.Dequeue: ActiveRequest._dequeue,
    ev.LeasePrefill: ActiveRequest._lease_prefill,
    ev.GrantKv: ActiveRequest._grant_kv,
    ev.LeaseDecode: ActiveRequest._lease_decode,
    ev.CancelLease: ActiveRequest._cancel_lease,
    ev.KeepScores: ActiveRequest._keep_scores,
    ev.NoteCached: ActiveRequest._note_cached,
    ev.WatchOffer: ActiveRequest._watch_offer,
    ev.RetryAfter: ActiveRequest._retry_after,
    ev.Deliver: ActiveRequest._deliver,
    ev.End: ActiveRequest._end,
}
