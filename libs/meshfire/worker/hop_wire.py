"""Hops and their answers as messages: of the held stream, and of a lane.

Owns both forms and the cut of a step into hops of bounded size. Knows neither sockets nor threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from meshfire.api.common.v1 import tensor_pb2
from meshfire.api.expert_shard.v1 import expert_shard_service_pb2 as pb
from meshfire.dispatch.combine import Partial
from meshfire.dispatch.plan import ShardPart
from meshfire.errors import InvalidTensor, MeshfireError
from meshfire.rpc import tensors
from meshfire.rpc.lane_frame import Frame, Kind, join_text
from meshfire.rpc.status import from_reason
from meshfire.worker.hop import Hop, HopStats

_FIXED = (tensor_pb2.DATA_TYPE_FIXED40,)


def request_of(hop: Hop) -> pb.ForwardRequest:
    """The hop for a stream."""
    step = hop.step
    return pb.ForwardRequest(
        hop_id=hop.hop_id,
        layer=step.layer,
        placement_epoch=hop.epoch,
        hidden=tensors.encode(_rows_of(step.hidden, hop.rows)),
        topk_ids=tensors.encode(hop.topk_ids),
        topk_weights=tensors.encode(_rows_of(step.topk_weights, hop.rows)),
        traceparents=step.traceparents,
        fault=hop.fault,
    )


def frame_of(hop: Hop) -> Frame:
    """The hop for a lane: the step's own memory where all rows travel."""
    step = hop.step
    parts = _rows_of(step.hidden, hop.rows), hop.topk_ids, _rows_of(step.topk_weights, hop.rows)
    return Frame(
        Kind.HOP,
        hop.hop_id,
        step.layer,
        hop.epoch,
        hop.started_ns,
        tensors=[(tensors.wire_of(one), one) for one in parts],
        text=join_text(step.traceparents, hop.fault),
    )


def error_in(answer: pb.ForwardResponse | Frame) -> MeshfireError | None:
    """What a shard said instead of sums."""
    if isinstance(answer, Frame):
        if answer.kind is Kind.OUTPUT:
            return None
        said = pb.ForwardError.FromString(answer.text)
    elif answer.WhichOneof("result") == "output":
        return None
    else:
        said = answer.error
    return from_reason(said.reason, said.message, dict(said.metadata), retryable=False)


def partial_of(hop: Hop) -> Partial:
    """The sums that a hop has brought. Raises InvalidTensor."""
    shape = (hop.num_tokens, hop.step.hidden.shape[1])
    answer = hop.answer
    assert answer is not None
    if not isinstance(answer, Frame):
        return Partial(hop.rows, tensors.decode(answer.output, field="output", dtypes=_FIXED, shape=shape))
    if len(answer.tensors) != 1:
        raise InvalidTensor(f"output: {len(answer.tensors)} tensors, expected one", field="output")
    return Partial(hop.rows, tensors.check(*answer.tensors[0], field="output", dtypes=_FIXED, shape=shape))


def count(hop: Hop, partial: Partial, stats: HopStats) -> None:
    """Add an answered hop to what its shard has cost."""
    answer = hop.answer
    assert answer is not None
    stats.hops += 1
    stats.tokens += hop.num_tokens
    stats.bytes_out += hop.num_tokens * hop.step.hidden.shape[1] * hop.step.hidden.itemsize
    stats.bytes_in += partial.values.nbytes
    stats.wait_ns += hop.wait_ns
    stats.queue_ns += answer.queue_ns
    stats.compute_ns += answer.compute_ns


def pieces(part: ShardPart, base: Tensor | None, max_rows: int) -> Iterator[tuple[Tensor | None, Tensor]]:
    """(rows of the step, expert ids) of a part, at most `max_rows` at a time. `base`: the rows that were planned."""
    num_rows = len(part.topk_ids)
    rows = part.rows if base is None else base if part.rows is None else base[part.rows]
    if num_rows <= max_rows:
        yield rows, part.topk_ids
        return
    rows = torch.arange(num_rows) if rows is None else rows
    for start in range(0, num_rows, max_rows):
        stop = start + max_rows
        yield rows[start:stop], part.topk_ids[start:stop]


def _rows_of(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor[rows]
