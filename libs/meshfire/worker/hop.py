"""One layer's rows at one shard, and what a dispatch of them costs.

Owns the values that the other hop_* files share, and `PendingHops`: hops in the care of the event loop, for which the
model thread waits. Does not know streams, lanes, shards' addresses or retries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeout
from dataclasses import dataclass, field

from torch import Tensor

from meshfire.api.expert_shard.v1 import expert_shard_service_pb2 as pb
from meshfire.errors import MeshfireError
from meshfire.rpc.lane_frame import Frame


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

    hop_id: int
    step: Step
    shard_id: str
    #: of the placement that the rows were routed by
    epoch: int
    #: [n] rows of the dispatch; None = all
    rows: Tensor | None
    #: [n, K]; -1 where the expert is another shard's
    topk_ids: Tensor
    #: still to be told
    fault: str
    started_ns: int
    #: while the event loop cares for it
    pending: PendingHops | None = None
    answer: pb.ForwardResponse | Frame | None = None
    wait_ns: int = 0

    @property
    def num_tokens(self) -> int:
        """Rows that travel."""
        return len(self.topk_ids)


@dataclass(eq=False)
class PendingHops:
    """Hops of one dispatch, on the event loop: complete when every one has an answer.

    `done`, `waiting` and `answered` belong to the event loop until `done` is set.
    """

    step: Step
    #: called on the model thread when the deadline passes first: says why, and has the hops forgotten
    give_up: Callable[[PendingHops], MeshfireError]
    done: Future[None] = field(default_factory=Future)
    waiting: set[Hop] = field(default_factory=set)
    answered: list[Hop] = field(default_factory=list)

    def wait(self) -> list[Hop]:
        """Wait for all hops; model thread. Raises ShardUnavailable, DeadlineExceeded, or what a shard said."""
        try:
            self.done.result(max(0.0, self.step.deadline - time.monotonic()))
        except WaitTimeout:
            raise self.give_up(self) from None
        return self.answered

    def answer(self, hop: Hop, response: pb.ForwardResponse) -> None:
        """Note a good answer. A hop that was replaced or given up is ignored."""
        if hop not in self.waiting:
            return
        hop.answer = response
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
