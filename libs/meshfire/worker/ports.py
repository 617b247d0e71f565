"""What the engines of workers need from outside, as small Protocols: real parts and test doubles fit alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.model.interface import ExpertBackend, PendingExperts
from meshfire.worker.faults import HopFault
from meshfire.worker.hop import HopStats


class ExpertSession(ExpertBackend, Protocol):
    """The experts for one prompt or step: its deadline, its traces, its costs."""

    @property
    def stats(self) -> Mapping[str, HopStats]:
        """Costs so far by shard id."""


class Experts(Protocol):
    """Makes sessions; meshfire.worker.experts.ExpertMesh is one."""

    def session(self, *, deadline: float, traceparents: Sequence[str], fault: HopFault | None = None) -> ExpertSession:
        """Experts for steps of these traces until `deadline` (time.monotonic()). `fault` is a test hook."""

    def finish(self, traceparents: Sequence[str]) -> None:
        """No more steps of these traces will come: shards end their spans."""


class Link(Protocol):
    """The way to the routers; meshfire.worker.link.WorkerLink is one."""

    def send(self, router_id: str, message: pb.WorkRequest) -> None:
        """Queue a message; never waits."""

    def set_credit(self, num_slots: int, num_free_blocks: int, num_pending_tokens: int = 0) -> None:
        """Say how much room there is, and how much work."""


class LocalExperts:
    """`Experts` over a backend of this process: no shard that could cost or fail."""

    def __init__(self, backend: ExpertBackend) -> None:
        self._backend = backend

    def session(self, *, deadline: float, traceparents: Sequence[str], fault: HopFault | None = None) -> ExpertSession:
        """The backend, whatever the deadline: it never waits."""
        return _LocalSession(self._backend)

    def finish(self, traceparents: Sequence[str]) -> None:
        """Nobody to tell."""


class _LocalSession:
    def __init__(self, backend: ExpertBackend) -> None:
        self._backend = backend
        self.stats: Mapping[str, HopStats] = {}

    def dispatch(self, layer: int, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> PendingExperts:
        return self._backend.dispatch(layer, hidden, topk_ids, topk_weights)
