"""One hop: from its message to its answer.

Owns decoding, the checks of the message, timing and the form of errors, for both ways on which hops come. Runs on the
compute thread. Knows no stream and no socket.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from meshfire.api.common.v1 import tensor_pb2
from meshfire.api.expert_shard.v1 import expert_shard_service_pb2 as pb
from meshfire.errors import InternalError, InvalidTensor, MeshfireError
from meshfire.rpc import tensors
from meshfire.rpc.lane_frame import Frame, Kind
from services.expert_shard.core import ExpertStore

log = logging.getLogger(__name__)

_HIDDEN = (tensor_pb2.DATA_TYPE_FLOAT32, tensor_pb2.DATA_TYPE_BFLOAT16)
_IDS = (tensor_pb2.DATA_TYPE_INT32,)
_WEIGHTS = (tensor_pb2.DATA_TYPE_FLOAT32,)
_TENSORS_OF_A_HOP = 3

#: hidden [T, H], topk_ids [T, K], topk_weights [T, K]
_Step = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class HopCost:
    """What an answered hop took. Bytes are those of hidden states in and of sums out."""

    tokens: int
    bytes_in: int
    bytes_out: int
    queue_ns: int
    compute_ns: int


class Forwarder:
    """Answers hops from a store; every failure is an answer too, so that the stream lives on."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store

    def answer(self, request: pb.ForwardRequest, arrived_ns: int) -> pb.ForwardResponse:
        """Compute a hop of a stream that arrived at `arrived_ns` (time.perf_counter_ns())."""
        started_ns = time.perf_counter_ns()
        result = self._try(request.layer, lambda: self._decoded(request))
        if isinstance(result, MeshfireError):
            response = refusal(request, result)
        else:
            response = pb.ForwardResponse(hop_id=request.hop_id, output=tensors.encode_fixed(result))
        response.queue_ns = started_ns - arrived_ns
        response.compute_ns = time.perf_counter_ns() - started_ns
        return response

    def answer_frame(self, frame: Frame, arrived_ns: int) -> Frame:
        """The same for a hop of a lane."""
        started_ns = time.perf_counter_ns()
        result = self._try(frame.layer, lambda: self._held(frame))
        if isinstance(result, MeshfireError):
            answer = frame_refusal(frame, result)
        else:
            answer = Frame(Kind.OUTPUT, frame.hop_id, tensors=((tensors.wire_of(result, fixed=True), result),))
        answer.queue_ns = started_ns - arrived_ns
        answer.sent_ns = time.perf_counter_ns()
        answer.compute_ns = answer.sent_ns - started_ns
        return answer

    def _try(self, layer: int, step_of: Callable[[], _Step]) -> Tensor | MeshfireError:
        """The sums, [T, H] int64, or why there are none."""
        try:
            hidden, ids, weights = step_of()
            if hidden.numel() == 0 or ids.numel() == 0:
                raise InvalidTensor(f"a hop without rows or experts: {list(ids.shape)}", field="topk_ids.shape")
            return self._store.forward(layer, hidden, ids, weights)
        except MeshfireError as error:
            return error
        except Exception:
            log.exception("hop of layer %d failed", layer)
            return InternalError("internal error")

    def _decoded(self, request: pb.ForwardRequest) -> _Step:
        size = self._store.layout.hidden_size
        hidden = tensors.decode(request.hidden, field="hidden", dtypes=_HIDDEN, shape=(None, size))
        ids = tensors.decode(request.topk_ids, field="topk_ids", dtypes=_IDS, shape=(len(hidden), None))
        weights = tensors.decode(request.topk_weights, field="topk_weights", dtypes=_WEIGHTS, shape=tuple(ids.shape))
        return hidden, ids, weights

    def _held(self, frame: Frame) -> _Step:
        if len(frame.tensors) != _TENSORS_OF_A_HOP:
            raise InvalidTensor(f"a hop of {len(frame.tensors)} tensors, expected hidden, topk_ids and topk_weights")
        hidden, ids, weights = frame.tensors
        size = self._store.layout.hidden_size
        return (
            tensors.check(*hidden, field="hidden", dtypes=_HIDDEN, shape=(None, size)),
            tensors.check(*ids, field="topk_ids", dtypes=_IDS, shape=(len(hidden[1]), None)),
            tensors.check(*weights, field="topk_weights", dtypes=_WEIGHTS, shape=tuple(ids[1].shape)),
        )


def refusal(request: pb.ForwardRequest, error: MeshfireError) -> pb.ForwardResponse:
    """An answer that says why there is no output."""
    return pb.ForwardResponse(hop_id=request.hop_id, error=_told(error))


def frame_refusal(frame: Frame, error: MeshfireError) -> Frame:
    """The same on a lane."""
    return Frame(Kind.ERROR, frame.hop_id, text=_told(error).SerializeToString())


def _told(error: MeshfireError) -> pb.ForwardError:
    metadata = dict(error.metadata)
    if error.field is not None:
        metadata["field"] = error.field
    return pb.ForwardError(reason=error.reason, message=error.message, metadata=metadata)


def wants_answer(request: pb.ForwardRequest) -> bool:
    """Whether it is a hop. One that only closes traces is not answered."""
    return request.HasField("hidden") or not request.finished_traceparents


def cost_of(request: pb.ForwardRequest, response: pb.ForwardResponse) -> HopCost:
    """What a hop of a stream took, as far as its message says."""
    tokens = request.hidden.shape[0] if request.hidden.shape else 0
    sizes = len(request.hidden.data), len(response.output.data)
    return HopCost(tokens, *sizes, response.queue_ns, response.compute_ns)


def cost_of_frame(frame: Frame, answer: Frame) -> HopCost:
    """What a hop of a lane took."""
    hidden, output = (one.tensors[0][1] if one.tensors else None for one in (frame, answer))
    return HopCost(
        0 if hidden is None else len(hidden),
        0 if hidden is None else hidden.nbytes,
        0 if output is None else output.nbytes,
        answer.queue_ns,
        answer.compute_ns,
    )
