"""A dispatch under way: its hops, their answers, and what they cost.

Owns the meeting of two threads: the model thread makes a `PendingHops` and waits on it, the event loop feeds it.
Does not know streams, shards' addresses or retries: a hop that is lost is replaced through `replace`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeout
from dataclasses import dataclass, field

from torch import Tensor

from meshfire.api.common.v1 import tensor_pb2
from meshfire.api.expert_shard.v1 import expert_shard_service_pb2 as pb
from meshfire.dispatch.combine import Partial, combine
from meshfire.errors import MeshfireError
from meshfire.rpc import tensors

_FIXED = (tensor_pb2.DATA_TYPE_FIXED40,)


@dataclass
class HopStats:
    """What one shard cost a session. `wait_ns` is the caller's view, `queue_ns` and `compute_ns` the shard's."""

    hops: int = 0
    tokens: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    wait_ns: int = 0
    queue_ns: int = 0
    compute_ns: int = 0


@dataclass(frozen=True)
class Step:
    """What a dispatch was called with. The caller leaves the tensors as they are until it has the result."""

    layer: int
    #: [T, H] float32 or bfloat16
    hidden: Tensor
    #: [T, K] int32
    topk_ids: Tensor
    #: [T, K] float32
    topk_weights: Tensor
    traceparents: Sequence[str]
    #: time.monotonic()
    deadline: float
    #: test hook: told to every shard of this dispatch, once
    fault: str = ""


@dataclass(eq=False, slots=True)
class Hop:
    """Rows of one dispatch at one shard."""

    pending: PendingHops
    shard_id: str
    #: [n] rows of the dispatch; None = all
    rows: Tensor | None
    #: [n, K]; -1 where the expert is another shard's
    topk_ids: Tensor
    request: pb.ForwardRequest
    started_ns: int
    response: pb.ForwardResponse | None = None
    wait_ns: int = 0

    @property
    def num_tokens(self) -> int:
        """Rows that travel."""
        return len(self.topk_ids)


@dataclass(eq=False)
class PendingHops:
    """One dispatch: complete when every hop has an answer. Implements `PendingExperts`.

    `done`, `waiting` and `answered` belong to the event loop until `done` is set.
    """

    step: Step
    stats: MutableMapping[str, HopStats]
    #: called on the model thread when the deadline passes first: says why, and has the hops forgotten
    give_up: Callable[[PendingHops], MeshfireError]
    done: Future[None] = field(default_factory=Future)
    waiting: set[Hop] = field(default_factory=set)
    answered: list[Hop] = field(default_factory=list)

    def result(self) -> Tensor:
        """Wait for all hops and add them up: [T, H] float32. Call once, on the thread that dispatched.

        Raises ShardUnavailable, DeadlineExceeded, or what a shard said of this step.
        """
        try:
            self.done.result(self.step.deadline - time.monotonic())
        except WaitTimeout:
            raise self.give_up(self) from None
        num_tokens, hidden_size = self.step.hidden.shape
        return combine([self._take(hop) for hop in self.answered], num_tokens, hidden_size)

    def answer(self, hop: Hop, response: pb.ForwardResponse) -> None:
        """Note a good answer. A hop that was replaced or given up is ignored."""
        if hop not in self.waiting:
            return
        hop.response = response
        hop.wait_ns = time.perf_counter_ns() - hop.started_ns
        self.waiting.remove(hop)
        self.answered.append(hop)
        if not self.waiting:
            self._end(None)

    def replace(self, hop: Hop, others: Sequence[Hop]) -> None:
        """Other hops compute `hop`'s rows."""
        self.waiting.discard(hop)
        self.waiting.update(others)

    def fail(self, error: MeshfireError) -> None:
        """End with an error; answers that come later are ignored."""
        self.waiting.clear()
        self._end(error)

    def _end(self, error: MeshfireError | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)

    def _take(self, hop: Hop) -> Partial:
        response = hop.response
        assert response is not None
        shape = (hop.num_tokens, self.step.hidden.shape[1])
        values = tensors.decode(response.output, field="output", dtypes=_FIXED, shape=shape)
        stats = self.stats.setdefault(hop.shard_id, HopStats())
        stats.hops += 1
        stats.tokens += hop.num_tokens
        stats.bytes_out += len(hop.request.hidden.data)
        stats.bytes_in += len(response.output.data)
        stats.wait_ns += hop.wait_ns
        stats.queue_ns += response.queue_ns
        stats.compute_ns += response.compute_ns
        return Partial(hop.rows, values)
