"""One hop: from its message to its answer.

Owns decoding, the checks of the message, timing and the form of errors. Runs on the model thread. Knows no stream.
"""

from __future__ import annotations

import logging
import time

from meshfire.api.common.v1 import tensor_pb2
from meshfire.api.expert_shard.v1 import expert_shard_service_pb2 as pb
from meshfire.errors import InternalError, InvalidTensor, MeshfireError
from meshfire.rpc import tensors
from services.expert_shard.core import ExpertStore

log = logging.getLogger(__name__)

_HIDDEN = (tensor_pb2.DATA_TYPE_FLOAT32, tensor_pb2.DATA_TYPE_BFLOAT16)
_IDS = (tensor_pb2.DATA_TYPE_INT32,)
_WEIGHTS = (tensor_pb2.DATA_TYPE_FLOAT32,)


class Forwarder:
    """Answers hops from a store; every failure is an answer too, so that the stream lives on."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store

    def answer(self, request: pb.ForwardRequest, arrived_ns: int) -> pb.ForwardResponse:
        """Compute a hop that arrived at `arrived_ns` (time.perf_counter_ns())."""
        started_ns = time.perf_counter_ns()
        try:
            response = pb.ForwardResponse(hop_id=request.hop_id, output=self._compute(request))
        except MeshfireError as error:
            response = refusal(request, error)
        except Exception:
            log.exception("hop of layer %d failed", request.layer)
            response = refusal(request, InternalError("internal error"))
        response.queue_ns = started_ns - arrived_ns
        response.compute_ns = time.perf_counter_ns() - started_ns
        return response

    def _compute(self, request: pb.ForwardRequest) -> tensor_pb2.Tensor:
        size = self._store.layout.hidden_size
        hidden = tensors.decode(request.hidden, field="hidden", dtypes=_HIDDEN, shape=(None, size))
        ids = tensors.decode(request.topk_ids, field="topk_ids", dtypes=_IDS, shape=(len(hidden), None))
        weights = tensors.decode(request.topk_weights, field="topk_weights", dtypes=_WEIGHTS, shape=tuple(ids.shape))
        if hidden.numel() == 0 or ids.numel() == 0:
            raise InvalidTensor(f"a hop without rows or experts: {list(ids.shape)}", field="topk_ids.shape")
        return tensors.encode_fixed(self._store.forward(request.layer, hidden, ids, weights))


def refusal(request: pb.ForwardRequest, error: MeshfireError) -> pb.ForwardResponse:
    """An answer that says why there is no output."""
    metadata = dict(error.metadata)
    if error.field is not None:
        metadata["field"] = error.field
    said = pb.ForwardError(reason=error.reason, message=error.message, metadata=metadata)
    return pb.ForwardResponse(hop_id=request.hop_id, error=said)


def wants_answer(request: pb.ForwardRequest) -> bool:
    """Whether it is a hop. One that only closes traces is not answered."""
    return request.HasField("hidden") or not request.finished_traceparents


def num_rows(request: pb.ForwardRequest) -> int:
    """Tokens of a hop, as far as its message says."""
    return request.hidden.shape[0] if request.hidden.shape else 0
