"""Leases, grants and cancels as the worker reads them: pure builders of WorkService messages."""

from __future__ import annotations

from collections.abc import Sequence

from meshfire.api.router.v1 import work_service_pb2 as pb
from services.router.lifecycle_events import Offer
from services.router.work import Work


def prefill_lease(
    work: Work, epoch: int, generated: Sequence[int], remaining_ms: int, *, score: bool = False
) -> pb.WorkResponse:
    """Compute the KV of the prompt and of what was generated so far; `score`: tell the prompt's log-probabilities."""
    lease = _lease(work, epoch, remaining_ms)
    lease.prefill.token_ids.extend(work.prompt)
    lease.prefill.token_ids.extend(generated)
    lease.prefill.cache_salt = work.cache_salt
    if score and work.num_prompt_logprobs is not None:
        lease.prefill.num_prompt_logprobs = work.num_prompt_logprobs
    return pb.WorkResponse(lease=lease)


def decode_lease(
    work: Work, epoch: int, generated: Sequence[int], remaining_ms: int, offer: Offer, kv_address: str
) -> pb.WorkResponse:
    """Go on from the offered KV."""
    lease = _decode(work, epoch, generated, remaining_ms)
    lease.decode.kv_lease_id = offer.kv_lease_id
    lease.decode.kv_address = kv_address
    return pb.WorkResponse(lease=lease)


def local_lease(
    work: Work, epoch: int, generated: Sequence[int], remaining_ms: int, *, score: bool = False
) -> pb.WorkResponse:
    """Compute the prompt and what was generated so far, and go on; `score`: tell the prompt's log-probabilities."""
    lease = _decode(work, epoch, generated, remaining_ms)
    if score and work.num_prompt_logprobs is not None:
        lease.decode.num_prompt_logprobs = work.num_prompt_logprobs
    return pb.WorkResponse(lease=lease)


def kv_grant(epoch: int, offer: Offer, reader_id: str) -> pb.WorkResponse:
    """Say who may read."""
    return pb.WorkResponse(kv_grant=pb.KvGrant(kv_lease_id=offer.kv_lease_id, epoch=epoch, reader_id=reader_id))


def cancel(request_id: str, epoch: int) -> pb.WorkResponse:
    """Stop and free."""
    return pb.WorkResponse(cancel=pb.LeaseCancel(request_id=request_id, epoch=epoch))


def _lease(work: Work, epoch: int, remaining_ms: int) -> pb.Lease:
    # A rehearsed failure strikes once: the next epoch must be able to do better.
    fault = work.fault if epoch == 1 else ""
    return pb.Lease(
        request_id=work.request_id,
        epoch=epoch,
        remaining_ms=remaining_ms,
        traceparent=work.traceparent,
        fault=fault,
    )


def _decode(work: Work, epoch: int, generated: Sequence[int], remaining_ms: int) -> pb.Lease:
    lease = _lease(work, epoch, remaining_ms)
    decode = lease.decode
    decode.token_ids.extend(work.prompt)
    decode.token_ids.extend(generated)
    decode.num_prompt_tokens = len(work.prompt)
    decode.cache_salt = work.cache_salt
    decode.sampling.CopyFrom(work.sampling)
    if work.rule is not None:
        decode.rule.CopyFrom(work.rule)
    if work.script is not None:
        decode.scripted = True
        decode.script_token_ids.extend(work.script.token_ids)
        decode.script_ends_with_eos = work.script.ends_with_eos
        if work.script.wants is not None:
            decode.script_wants = work.script.wants
    return lease
