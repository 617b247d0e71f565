"""What the routers are told, as messages: one StepProgress per router and step, and how leases ended.

Owns the mapping from values to messages; sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.errors import MeshfireError
from meshfire.model.sampling import Sampled, TokenLogprobs
from meshfire.worker.lease_key import LeaseKey
from meshfire.worker.link import failure_of
from services.decode.ending import Ending, FinishReason
from services.decode.order import Order

_REASONS = {
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True)
class NewTokens:
    """Tokens of one output, at least one; `first_index` counts from the output's start."""

    order: Order
    first_index: int
    sampled: Sequence[Sampled]


def progress_by_router(new: Iterable[NewTokens]) -> dict[str, pb.WorkRequest]:
    """One message per router with everything that its requests got in this step."""
    messages: dict[str, pb.WorkRequest] = {}
    for one in new:
        message = messages.setdefault(one.order.key.router_id, pb.WorkRequest())
        message.progress.tokens.append(_progress(one))
    return messages


def prompt_computed(key: LeaseKey, num_cached_tokens: int) -> pb.WorkRequest:
    """The prompt of a lease without KV is computed."""
    message = pb.PromptComputed(request_id=key.request_id, epoch=key.epoch, num_cached_tokens=num_cached_tokens)
    return pb.WorkRequest(prompt_computed=message)


def finished(key: LeaseKey, ending: Ending, kv_bytes: int) -> pb.WorkRequest:
    """The output ended by itself."""
    message = pb.LeaseFinished(
        request_id=key.request_id,
        epoch=key.epoch,
        finish_reason=_REASONS[ending.reason],
        stop_token_id=ending.stop_token_id,
        kv_bytes=kv_bytes,
    )
    return pb.WorkRequest(finished=message)


def failed(key: LeaseKey, error: MeshfireError, *, retryable: bool) -> pb.WorkRequest:
    """The lease was given up; `retryable` as this worker sees it, whatever the error says of itself."""
    message = failure_of(key.request_id, key.epoch, error)
    message.retryable = retryable
    return pb.WorkRequest(failed=message)


def _progress(new: NewTokens) -> pb.TokenProgress:
    key = new.order.key
    message = pb.TokenProgress(
        request_id=key.request_id,
        epoch=key.epoch,
        first_index=new.first_index,
        token_ids=[one.token_id for one in new.sampled],
    )
    for one in new.sampled:
        if one.logprobs is not None:
            message.logprobs.append(_logprobs(one.logprobs))
    return message


def _logprobs(one: TokenLogprobs) -> sampling_pb2.TokenLogprobs:
    return sampling_pb2.TokenLogprobs(logprob=one.logprob, top_ids=one.top_ids, top_logprobs=one.top_logprobs)
