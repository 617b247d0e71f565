"""What can happen to a request, and what its life then asks for: the vocabulary of `lifecycle.apply`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from meshfire.errors import MeshfireError
from services.router.output import FinishReason, Logprobs, OutputToken


class Stage(Enum):
    """Which kind of worker a lease is for."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Offer:
    """KV that waits at a prefill worker."""

    kv_lease_id: str
    num_tokens: int
    num_cached_tokens: int
    num_bytes: int
    #: freed after this unless granted and read
    expires_ms: int


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """A worker with room was found for the queued lease."""

    worker_id: str
    #: why this one, and the cached tokens expected there
    reason: str = ""
    num_cached_expected: int = 0
    #: a decode worker, which computes the prompt itself
    is_local: bool = False


@dataclass(frozen=True)
class PromptScored:
    """Whoever computes the prompt tells its log-probabilities, from its token `first_index` on."""

    worker_id: str
    epoch: int
    first_index: int
    logprobs: tuple[Logprobs, ...]


@dataclass(frozen=True)
class PromptComputed:
    """The decode worker has computed the prompt itself; all that was to be told of it has come."""

    worker_id: str
    epoch: int
    num_cached_tokens: int


@dataclass(frozen=True)
class Offered:
    """The prefill worker has the KV ready."""

    worker_id: str
    epoch: int
    offer: Offer


@dataclass(frozen=True)
class Progressed:
    """The decode worker chose tokens; `first_index` is the first one's index in the output."""

    worker_id: str
    epoch: int
    first_index: int
    tokens: tuple[OutputToken, ...]


@dataclass(frozen=True)
class Completed:
    """The decode worker says that the output is complete."""

    worker_id: str
    epoch: int
    reason: FinishReason
    stop_token_id: int | None = None
    kv_bytes: int = 0


@dataclass(frozen=True)
class LeaseFailed:
    """A worker gave its lease up."""

    worker_id: str
    epoch: int
    error: MeshfireError
    retryable: bool


@dataclass(frozen=True)
class WorkerGone:
    """A worker's stream ended."""

    worker_id: str
    error: MeshfireError


@dataclass(frozen=True)
class Preempted:
    """Its lease is taken back for somebody who goes first. No failure: it waits again, with the tokens it has."""


@dataclass(frozen=True)
class OfferExpired:
    """The offered KV is not worth waiting for any more."""

    epoch: int


@dataclass(frozen=True)
class RetryDue:
    """The pause before the next epoch is over."""

    epoch: int


@dataclass(frozen=True)
class StopTextFound:
    """The detokenizer found a stop text."""


@dataclass(frozen=True)
class ClientGone:
    """Nobody waits for the output any more."""

    error: MeshfireError


@dataclass(frozen=True)
class DeadlinePassed:
    """Time is over."""

    error: MeshfireError


Event: TypeAlias = (
    Placed
    | PromptScored
    | PromptComputed
    | Offered
    | Progressed
    | Completed
    | LeaseFailed
    | WorkerGone
    | Preempted
    | OfferExpired
    | RetryDue
    | StopTextFound
    | ClientGone
    | DeadlinePassed
)

# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Enqueue:
    """Wait for a worker of this stage; answered by Placed."""

    stage: Stage
    epoch: int


@dataclass(frozen=True)
class Dequeue:
    """Wait no more."""


@dataclass(frozen=True)
class LeasePrefill:
    """Lease the prompt and the tokens so far."""

    worker_id: str
    epoch: int
    #: of the placement
    reason: str = ""
    num_cached_expected: int = 0


@dataclass(frozen=True)
class GrantKv:
    """Tell the KV's owner who may read it."""

    worker_id: str
    epoch: int
    offer: Offer
    reader_id: str


@dataclass(frozen=True)
class LeaseDecode:
    """Lease the continuation; without an offer the prompt as well."""

    worker_id: str
    epoch: int
    offer: Offer | None
    #: of the placement, without an offer
    reason: str = ""
    num_cached_expected: int = 0


@dataclass(frozen=True)
class CancelLease:
    """Tell a worker to free what it holds of this epoch."""

    worker_id: str
    epoch: int


@dataclass(frozen=True)
class KeepScores:
    """Log-probabilities of prompt tokens that were not known yet, in order."""

    logprobs: tuple[Logprobs, ...]


@dataclass(frozen=True)
class NoteCached:
    """Tokens of the prompt that the decode worker, which computed it, had already."""

    num_tokens: int


@dataclass(frozen=True)
class WatchOffer:
    """Answer OfferExpired in time, should the KV still wait."""

    epoch: int
    expires_ms: int


@dataclass(frozen=True)
class RetryAfter:
    """Answer RetryDue after a pause that grows with the failures in a row."""

    epoch: int
    failures_in_row: int


@dataclass(frozen=True)
class Deliver:
    """Tokens that the client has not had yet, in order."""

    tokens: tuple[OutputToken, ...]


@dataclass(frozen=True)
class Ending:
    """How a request ended; `error` is set exactly if it did not finish."""

    reason: FinishReason | None = None
    stop_token_id: int | None = None
    #: bytes of KV that decode read; None = it did not say
    kv_bytes: int | None = None
    error: MeshfireError | None = None


@dataclass(frozen=True)
class End:
    """The last action of a life."""

    ending: Ending


Action: TypeAlias = (
    Enqueue
    | Dequeue
    | LeasePrefill
    | GrantKv
    | LeaseDecode
    | CancelLease
    | KeepScores
    | NoteCached
    | WatchOffer
    | RetryAfter
    | Deliver
    | End
)
