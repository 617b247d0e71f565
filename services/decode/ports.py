"""What the engine needs from outside, as small Protocols: real parts and test doubles fit alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.kv.transfer import KvManifest
from meshfire.model.interface import ExpertBackend, PendingExperts
from meshfire.worker.hop import HopStats
from services.decode.kv_reader import KvRead, KvSource


class ExpertSession(ExpertBackend, Protocol):
    """The experts for one step: its deadline, its traces, its costs."""

    @property
    def stats(self) -> Mapping[str, HopStats]:
        """Costs so far by shard id."""


class Experts(Protocol):
    """Makes sessions; meshfire.worker.experts.ExpertMesh is one."""

    def session(self, *, deadline: float, traceparents: Sequence[str]) -> ExpertSession:
        """Experts for one step of these traces until `deadline` (time.monotonic())."""

    def finish(self, traceparents: Sequence[str]) -> None:
        """No more steps of these traces will come: shards end their spans."""


class Link(Protocol):
    """The way to the routers; meshfire.worker.link.WorkerLink is one."""

    def send(self, router_id: str, message: pb.WorkRequest) -> None:
        """Queue a message; never waits."""

    def set_credit(self, num_slots: int, num_free_blocks: int) -> None:
        """Say how much room there is."""


class Reader(Protocol):
    """Reads KV from prefill workers; services.decode.kv_reader.KvReader is one."""

    async def read(
        self, source: KvSource, wanted: KvManifest, block_table: Sequence[int], num_held_blocks: int
    ) -> KvRead:
        """Fill the blocks that are not held; raises what went wrong."""

    async def release(self, source: KvSource, *, acknowledged: bool) -> None:
        """End the KV's lease at its owner; never fails."""


class LocalExperts:
    """`Experts` over a backend of this process: no shard, no cost to tell."""

    def __init__(self, backend: ExpertBackend) -> None:
        self._backend = backend

    def session(self, *, deadline: float, traceparents: Sequence[str]) -> ExpertSession:
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
