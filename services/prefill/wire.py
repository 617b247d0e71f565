"""Messages ⇄ values of this service. Decides nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

from meshfire.api.prefill.v1 import prefill_service_pb2 as pb
from meshfire.api.router.v1 import work_service_pb2 as work_pb
from meshfire.errors import BadInput, DeadlineExceeded
from meshfire.kv.lease import KvLease
from meshfire.kv.transfer import Frame, Trailer
from meshfire.model.interface import KvGeometry
from meshfire.rpc import geometry as geometry_codec
from meshfire.rpc import tensors
from meshfire.worker.faults import rehearsed
from meshfire.worker.lease_key import LeaseKey
from services.prefill.prompt import Prefilled, Prompt


def prompt_from(router_id: str, lease: work_pb.Lease, *, hooks_on: bool) -> Prompt:
    """A lease as a prompt. Raises BadInput, DeadlineExceeded, TestHooksOff."""
    if lease.WhichOneof("work") != "prefill":
        raise BadInput("a prefill worker was sent a lease that is not prefill work", field="work")
    if lease.remaining_ms <= 0:
        raise DeadlineExceeded("the request's deadline had passed before the lease arrived")
    return Prompt(
        key=LeaseKey(router_id, lease.request_id, lease.epoch),
        token_ids=tuple(lease.prefill.token_ids),
        cache_salt=lease.prefill.cache_salt,
        deadline=time.monotonic() + lease.remaining_ms / 1e3,
        traceparent=lease.traceparent,
        fault=rehearsed(lease.fault, epoch=lease.epoch, hooks_on=hooks_on),
        num_logprobs=lease.prefill.num_prompt_logprobs if lease.prefill.HasField("num_prompt_logprobs") else None,
    )


def offer_of(prompt: Prompt, prefilled: Prefilled, lease: KvLease) -> work_pb.WorkRequest:
    """The offer of a computed prompt."""
    return work_pb.WorkRequest(
        kv_offer=work_pb.KvOffer(
            request_id=prompt.key.request_id,
            epoch=prompt.key.epoch,
            kv_lease_id=lease.lease_id,
            num_tokens=prefilled.manifest.num_tokens,
            num_cached_tokens=prefilled.num_cached_tokens,
            num_bytes=prefilled.num_bytes,
            expires_ms=max(0, int((lease.deadline - time.monotonic()) * 1e3)),
        )
    )


@dataclass(frozen=True)
class ReadOrder:
    """What a reader asks for."""

    lease_id: str
    epoch: int
    reader_id: str
    wanted_blocks: tuple[int, ...]
    geometry: KvGeometry
    model_revision: str


def order_from(request: pb.ReadKvRequest) -> ReadOrder:
    """A request as an order. Raises BadInput, InvalidTensor."""
    wanted = tuple(request.wanted_blocks)
    if any(later <= earlier for earlier, later in pairwise(wanted)) or (wanted and wanted[0] < 0):
        raise BadInput("wanted_blocks must be ascending block indices, each once", field="wanted_blocks")
    return ReadOrder(
        lease_id=request.kv_lease_id,
        epoch=request.epoch,
        reader_id=request.reader_id,
        wanted_blocks=wanted,
        geometry=geometry_codec.from_wire(request.geometry),
        model_revision=request.model_revision,
    )


def header_of(order: ReadOrder, prefilled: Prefilled) -> pb.ReadKvResponse:
    """First frame."""
    manifest = prefilled.manifest
    return pb.ReadKvResponse(
        header=pb.KvHeader(
            kv_lease_id=order.lease_id,
            epoch=order.epoch,
            model_revision=manifest.model_revision,
            geometry=geometry_codec.to_wire(manifest.geometry),
            num_tokens=manifest.num_tokens,
            block_hashes=manifest.block_hashes,
            last_hidden=tensors.encode(prefilled.last_hidden),
        )
    )


def block_of(frame: Frame) -> pb.ReadKvResponse:
    """One slice of a block."""
    return pb.ReadKvResponse(
        block=pb.KvBlock(
            block_index=frame.block_index,
            layer_start=frame.layer_start,
            num_layers=frame.num_layers,
            data=frame.data,
            checksum=frame.checksum,
        )
    )


def trailer_of(trailer: Trailer) -> pb.ReadKvResponse:
    """Last frame."""
    return pb.ReadKvResponse(trailer=pb.KvTrailer(num_frames=trailer.num_frames, num_bytes=trailer.num_bytes))


def is_acknowledged(request: pb.ReleaseKvRequest) -> bool:
    """Whether the reader verified everything. Raises BadInput for an outcome that is not set or not known."""
    if request.outcome not in (pb.KV_OUTCOME_ACKNOWLEDGED, pb.KV_OUTCOME_ABANDONED):
        raise BadInput("outcome must be ACKNOWLEDGED or ABANDONED", field="outcome")
    return request.outcome == pb.KV_OUTCOME_ACKNOWLEDGED
