"""The life of one request as a pure state machine: `apply(life, event)` → the next life and what to do.

    queued_prefill → prefilling → queued_decode → decoding → finished
          ↑              │    (KV offered) │          │
          └── paused ←───┴─────────────────┴──────────┘      any → failed | cancelled
          └── a decode worker computes the prompt itself ──▶ decoding

One round from prefill to the end is an epoch. Every failure that another worker may mend abandons the epoch: whoever
still holds something of it is told, its messages are ignored from then on, and the next epoch starts with the prompt
and the tokens that were delivered. So a token is delivered once and in order, and the end comes once.

Knows no clocks, queues, streams or text. Token values live with the caller; here they are only counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias

from meshfire.errors import DataLoss, MeshfireError
from services.router import lifecycle_events as ev
from services.router.output import FinishReason, OutputToken


class Phase(Enum):
    """Where a request is."""

    QUEUED_PREFILL = "queued_prefill"
    PREFILLING = "prefilling"
    #: the prefill worker offers the KV; the decode lease waits for room
    QUEUED_DECODE = "queued_decode"
    DECODING = "decoding"
    #: failed more than once in a row: waits before the next epoch
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({Phase.FINISHED, Phase.FAILED, Phase.CANCELLED})
_QUEUED = frozenset({Phase.QUEUED_PREFILL, Phase.QUEUED_DECODE})


@dataclass(frozen=True)
class Limits:
    """What ends an output, as far as token ids tell. `end_ids` count from output index `min_tokens` on."""

    #: 0 = only the prompt is wanted: its offer ends the request
    max_tokens: int
    min_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    #: prompt tokens whose log-probability is wanted; they come before the offer
    num_scored: int = 0


@dataclass(frozen=True)
class Life:
    """The state. Workers are named only while they hold something of this epoch."""

    limits: Limits
    phase: Phase = Phase.QUEUED_PREFILL
    epoch: int = 1
    num_tokens: int = 0
    #: prompt tokens whose log-probability is known, from token 1 on
    num_scored: int = 0
    prefill_worker: str | None = None
    decode_worker: str | None = None
    offer: ev.Offer | None = None
    #: a token of this epoch arrived: the decode worker holds the KV, the prefill worker owes nothing
    decode_started: bool = False
    #: an end token arrived before the decode worker said that it had finished
    stop_token_id: int | None = None
    num_failures: int = 0
    failures_in_row: int = 0
    #: failed last; another one is preferred
    avoid: str | None = None
    last_error: MeshfireError | None = None

    @property
    def holders(self) -> frozenset[str]:
        """Workers that hold a lease or KV of this epoch."""
        if self.phase is Phase.DECODING:
            named = (self.decode_worker, None if self.decode_started else self.prefill_worker)
        elif self.phase is Phase.PREFILLING or self.phase is Phase.QUEUED_DECODE:
            named = (self.prefill_worker, None)
        else:
            return frozenset()
        return frozenset(worker for worker in named if worker is not None)

    def holds_like(self, other: Life) -> bool:
        """Whether the same workers hold something, as far as can be told without looking: true of most steps."""
        return (
            self.phase is other.phase
            and self.decode_started == other.decode_started
            and self.prefill_worker == other.prefill_worker
            and self.decode_worker == other.decode_worker
        )


Step: TypeAlias = tuple[Life, tuple[ev.Action, ...]]


def begin(limits: Limits) -> Step:
    """A new request: its prefill waits."""
    life = Life(limits)
    return life, (ev.Enqueue(ev.Stage.PREFILL, life.epoch),)


def apply(life: Life, event: ev.Event) -> Step:
    """Take one event. What does not fit the phase or the epoch is old news and changes nothing."""
    if life.phase in ENDED:
        return life, ()
    handler: Callable[[Life, Any], Step] = _HANDLERS[type(event)]
    return handler(life, event)


def _placed(life: Life, event: ev.Placed) -> Step:
    why = (event.reason, event.num_cached_expected)
    if life.phase is Phase.QUEUED_PREFILL and event.is_local:
        placed = replace(life, phase=Phase.DECODING, decode_worker=event.worker_id)
        return placed, (ev.LeaseDecode(event.worker_id, life.epoch, None, *why),)
    if life.phase is Phase.QUEUED_PREFILL:
        placed = replace(life, phase=Phase.PREFILLING, prefill_worker=event.worker_id)
        return placed, (ev.LeasePrefill(event.worker_id, life.epoch, *why),)
    if life.phase is Phase.QUEUED_DECODE:
        assert life.prefill_worker is not None
        assert life.offer is not None
        placed = replace(life, phase=Phase.DECODING, decode_worker=event.worker_id)
        # The grant goes first: the reader may come as soon as it has the lease.
        return placed, (
            ev.GrantKv(life.prefill_worker, life.epoch, life.offer, event.worker_id),
            ev.LeaseDecode(event.worker_id, life.epoch, life.offer),
        )
    return life, ()


def _scored(life: Life, event: ev.PromptScored) -> Step:
    if not _computing(life) or not _current(life, event):
        return life, ()
    next_index = life.num_scored + 1
    if event.first_index > next_index:
        return _fail_over(life, _unscored(next_index, event.first_index), blamed=event.worker_id)
    # An epoch before may have told some of them: they are the same.
    fresh = event.logprobs[next_index - event.first_index :][: life.limits.num_scored - life.num_scored]
    return replace(life, num_scored=life.num_scored + len(fresh)), (ev.KeepScores(fresh),) if fresh else ()


def _unscored(first: int, stop: int) -> DataLoss:
    return DataLoss(f"log-probabilities of prompt tokens {first} to {stop - 1} are missing", field="first_index")


def _scores_missing(life: Life) -> DataLoss:
    return _unscored(life.num_scored + 1, life.limits.num_scored + 1)


def _computing(life: Life) -> bool:
    """Whether a worker computes the prompt now."""
    return life.phase is Phase.PREFILLING or (life.phase is Phase.DECODING and life.offer is None)


def _prompt_computed(life: Life, event: ev.PromptComputed) -> Step:
    if life.phase is not Phase.DECODING or not _computing(life) or not _current(life, event):
        return life, ()
    if life.num_scored < life.limits.num_scored:
        return _fail_over(life, _scores_missing(life), blamed=event.worker_id)
    return life, (ev.NoteCached(event.num_cached_tokens),)


def _offered(life: Life, event: ev.Offered) -> Step:
    if life.phase is not Phase.PREFILLING or not _current(life, event):
        return life, ()
    if life.num_scored < life.limits.num_scored:
        return _fail_over(life, _scores_missing(life), blamed=event.worker_id)
    if life.limits.max_tokens == 0:
        ended, actions = _end(life, Phase.FINISHED, ev.Ending(FinishReason.LENGTH, kv_bytes=0))
        # The offer is noted for the usage, and withdrawn: nobody reads it.
        return replace(ended, offer=event.offer), (ev.WatchOffer(life.epoch, event.offer.expires_ms), *actions)
    offered = replace(life, phase=Phase.QUEUED_DECODE, offer=event.offer)
    return offered, (ev.Enqueue(ev.Stage.DECODE, life.epoch), ev.WatchOffer(life.epoch, event.offer.expires_ms))


def _progressed(life: Life, event: ev.Progressed) -> Step:
    if life.phase is not Phase.DECODING or event.worker_id != life.decode_worker or event.epoch != life.epoch:
        return life, ()
    if life.num_scored < life.limits.num_scored:
        return _fail_over(life, _scores_missing(life), blamed=event.worker_id)
    if event.first_index > life.num_tokens:
        lost = DataLoss(f"tokens {life.num_tokens} to {event.first_index - 1} are missing", field="first_index")
        return _fail_over(life, lost, blamed=event.worker_id)
    if life.stop_token_id is not None:
        return life, ()
    fresh, stop_token_id = _until_end(life, event.tokens[life.num_tokens - event.first_index :])
    if not fresh and stop_token_id is None:
        return life, ()
    onward = replace(
        life,
        num_tokens=life.num_tokens + len(fresh),
        decode_started=True,
        stop_token_id=stop_token_id,
        failures_in_row=0,
        avoid=None,
        last_error=None,
    )
    return onward, (ev.Deliver(tuple(fresh)),) if fresh else ()


def _until_end(life: Life, tokens: Sequence[OutputToken]) -> tuple[Sequence[OutputToken], int | None]:
    """Cut at an end token, which has no text and is not delivered, and at max_tokens."""
    room = life.limits.max_tokens - life.num_tokens
    for offset, token in enumerate(tokens[:room]):
        if token.token_id in life.limits.end_ids and life.num_tokens + offset >= life.limits.min_tokens:
            return tokens[:offset], token.token_id
    return tokens[:room], None


def _completed(life: Life, event: ev.Completed) -> Step:
    if life.phase is not Phase.DECODING or event.worker_id != life.decode_worker or event.epoch != life.epoch:
        return life, ()
    if life.num_scored < life.limits.num_scored:
        return _fail_over(life, _scores_missing(life), blamed=event.worker_id, released=event.worker_id)
    stop_token_id = event.stop_token_id if event.stop_token_id is not None else life.stop_token_id
    return _end(life, Phase.FINISHED, ev.Ending(event.reason, stop_token_id, event.kv_bytes), released=event.worker_id)


def _lease_failed(life: Life, event: ev.LeaseFailed) -> Step:
    if not _current(life, event):
        return life, ()
    if not event.retryable:
        return _end(life, Phase.FAILED, ev.Ending(error=event.error), released=event.worker_id)
    return _fail_over(life, event.error, blamed=event.worker_id, released=event.worker_id)


def _worker_lost(life: Life, event: ev.WorkerGone) -> Step:
    if event.worker_id not in life.holders:
        return life, ()
    return _fail_over(life, event.error, blamed=event.worker_id, released=event.worker_id)


def _preempted(life: Life, event: ev.Preempted) -> Step:
    all_there = life.stop_token_id is not None or life.num_tokens >= life.limits.max_tokens
    if all_there or life.phase not in (Phase.PREFILLING, Phase.DECODING):
        return life, ()
    return _next_epoch(life, Phase.QUEUED_PREFILL)


def _offer_expired(life: Life, event: ev.OfferExpired) -> Step:
    if life.phase is not Phase.QUEUED_DECODE or event.epoch != life.epoch:
        return life, ()
    return _next_epoch(life, Phase.QUEUED_PREFILL)


def _retry_due(life: Life, event: ev.RetryDue) -> Step:
    if life.phase is not Phase.PAUSED or event.epoch != life.epoch:
        return life, ()
    return replace(life, phase=Phase.QUEUED_PREFILL), (ev.Enqueue(ev.Stage.PREFILL, life.epoch),)


def _stop_text_found(life: Life, event: ev.StopTextFound) -> Step:
    return _end(life, Phase.FINISHED, ev.Ending(FinishReason.STOP))


def _client_gone(life: Life, event: ev.ClientGone) -> Step:
    return _end(life, Phase.CANCELLED, ev.Ending(error=event.error))


def _deadline_passed(life: Life, event: ev.DeadlinePassed) -> Step:
    # Why it did not get further says more than that time is over.
    return _end(life, Phase.FAILED, ev.Ending(error=life.last_error or event.error))


def _fail_over(life: Life, error: MeshfireError, *, blamed: str, released: str | None = None) -> Step:
    """Go on at the next epoch, unless only the word that all is done was lost."""
    if life.stop_token_id is not None:
        return _end(life, Phase.FINISHED, ev.Ending(FinishReason.STOP, life.stop_token_id), released=released)
    if life.num_tokens >= life.limits.max_tokens:
        return _end(life, Phase.FINISHED, ev.Ending(FinishReason.LENGTH), released=released)
    failed = replace(
        life,
        num_failures=life.num_failures + 1,
        failures_in_row=life.failures_in_row + 1,
        avoid=blamed,
        last_error=error,
    )
    return _next_epoch(failed, Phase.QUEUED_PREFILL if failed.failures_in_row == 1 else Phase.PAUSED, released=released)


def _next_epoch(life: Life, phase: Phase, *, released: str | None = None) -> Step:
    fresh = replace(
        life,
        phase=phase,
        epoch=life.epoch + 1,
        prefill_worker=None,
        decode_worker=None,
        offer=None,
        decode_started=False,
    )
    onward: ev.Action = ev.Enqueue(ev.Stage.PREFILL, fresh.epoch)
    if phase is Phase.PAUSED:
        onward = ev.RetryAfter(fresh.epoch, fresh.failures_in_row)
    return fresh, (*_let_go(life, released), onward)


def _end(life: Life, phase: Phase, ending: ev.Ending, *, released: str | None = None) -> Step:
    return replace(life, phase=phase), (*_let_go(life, released), ev.End(ending))


def _let_go(life: Life, released: str | None) -> tuple[ev.Action, ...]:
    """Free everything of this epoch. `released` has let go by itself, or is dead."""
    told = tuple(ev.CancelLease(worker, life.epoch) for worker in sorted(life.holders - {released}))
    return (ev.Dequeue(), *told) if life.phase in _QUEUED else told


def _current(life: Life, event: ev.PromptScored | ev.PromptComputed | ev.Offered | ev.LeaseFailed) -> bool:
    return event.epoch == life.epoch and event.worker_id in life.holders


_HANDLERS: dict[type[Any], Callable[[Life, Any], Step]] = {
    ev.Placed: _placed,
    ev.PromptScored: _scored,
    ev.PromptComputed: _prompt_computed,
    ev.Offered: _offered,
    ev.Progressed: _progressed,
    ev.Completed: _completed,
    ev.LeaseFailed: _lease_failed,
    ev.WorkerGone: _worker_lost,
    ev.Preempted: _preempted,
    ev.OfferExpired: _offer_expired,
    ev.RetryDue: _retry_due,
    ev.StopTextFound: _stop_text_found,
    ev.ClientGone: _client_gone,
    ev.DeadlinePassed: _deadline_passed,
}
