"""The mesh's experts as a backend of the model: what LocalExperts does in this process, done by expert shards.

Owns the public face: open, ready, one session per step or chunk, finish. How a hop travels is in the hop_* files.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import torch
from torch import Tensor

from meshfire.api.expert_shard.v1 import expert_shard_service_pb2 as pb
from meshfire.discovery.base import Registry
from meshfire.model.interface import ExpertLayout
from meshfire.worker.faults import HopFault
from meshfire.worker.hop import Hop, HopStats, Step
from meshfire.worker.hop_dispatch import Dispatch
from meshfire.worker.hop_flow import HopFlow
from meshfire.worker.hop_link import Caller, Channels, HopTransport, ShardIdentity
from meshfire.worker.hop_peers import ShardPeers

#: a live shard that answers nothing for this long counts as frozen, and replicas take over
STALL_S = 5.0
#: how long ready() lets a mesh of another revision change before it says so
MISMATCH_PATIENCE_S = 5.0


class ExpertSession:
    """The experts for steps of one deadline and one set of traces. Implements `ExpertBackend`; model thread only."""

    def __init__(self, flow: HopFlow, deadline: float, traceparents: Sequence[str], fault: HopFault | None) -> None:
        #: what each shard cost so far; counts what was collected with `result()`
        self.stats: dict[str, HopStats] = {}
        self._flow = flow
        self._deadline = deadline
        self._traceparents = tuple(traceparents)
        self._fault = fault

    def dispatch(self, layer: int, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Dispatch:
        """Start the experts of one layer and return at once.

        `hidden` [T, H] float32 or bfloat16, `topk_ids` [T, K] (-1 = none), `topk_weights` [T, K] float32; all are left
        unchanged until `result()`. Raises ShardUnavailable, UnknownExpert.
        """
        step = Step(
            layer,
            hidden,
            topk_ids.to(torch.int32),
            topk_weights.float(),
            self._traceparents,
            deadline=self._deadline,
            fault=self._fault.due(layer) if self._fault else "",
        )
        return self._flow.dispatch(step, self.stats)


class ExpertMesh:
    """All expert shards of one model, seen from one worker.

    Example::

        async with ExpertMesh.open(model, revision, layout, mesh.registry, mesh.channels, worker_id) as experts:
            await experts.ready()
            session = experts.session(deadline=time.monotonic() + 30, traceparents=[traceparent])
            hidden = await model_thread.run(model.forward, batch, kv, session)
            experts.finish([traceparent])
    """

    def __init__(
        self,
        identity: ShardIdentity,
        layout: ExpertLayout,
        registry: Registry,
        channels: Channels,
        caller: Caller,
        stall_s: float,
        mismatch_patience_s: float,
    ) -> None:
        self._layout = layout
        self._mismatch_patience_s = mismatch_patience_s
        self._loop = asyncio.get_running_loop()
        self._peers = ShardPeers(identity, layout, registry, channels, self, caller)
        self._flow = HopFlow(self._peers, self._loop, stall_s=stall_s)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        model: str,
        model_revision: str,
        layout: ExpertLayout,
        registry: Registry,
        channels: Channels,
        caller_id: str,
        *,
        transport: HopTransport = "auto",
        stall_s: float = STALL_S,
        mismatch_patience_s: float = MISMATCH_PATIENCE_S,
    ) -> AsyncIterator[ExpertMesh]:
        """Connect for the length of a block. Hops that wait when it ends fail with ShardUnavailable."""
        identity = ShardIdentity(model, model_revision, layout.hidden_size)
        caller = Caller(caller_id, transport)
        mesh = cls(identity, layout, registry, channels, caller, stall_s, mismatch_patience_s)
        failure: Exception | None = None
        async with asyncio.TaskGroup() as group:
            tasks = mesh._start(group)
            try:
                yield mesh
            except Exception as error:  # raised below as itself: a task group would wrap the caller's error
                failure = error
            finally:
                for task in tasks:
                    task.cancel()
        if failure is not None:
            raise failure

    def _start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        if not self._has_experts:
            return []
        return [
            group.create_task(self._peers.run(), name="expert-peers"),
            group.create_task(self._flow.run(), name="expert-hops"),
        ]

    @property
    def _has_experts(self) -> bool:
        return any(self._layout.num_experts)

    @property
    def placement_epoch(self) -> int:
        """Epoch of the placement in force; 0 before the first."""
        planner = self._peers.planner
        return planner.shard_map.epoch if planner else 0

    @property
    def shards(self) -> Mapping[str, bool]:
        """Shard id → whether its stream is up and answers."""
        return {link.shard_id: self._peers.is_live(link.shard_id) for link in self._peers.links}

    async def ready(self) -> None:
        """Wait until a placement covers the model and all of its shards are connected and of the same revision.

        Waits without limit for what is not there yet. Raises ModelMismatch for what is there and another model's.
        """
        if self._has_experts:
            await self._peers.ready(self._mismatch_patience_s)

    def session(
        self, *, deadline: float, traceparents: Sequence[str] = (), fault: HopFault | None = None
    ) -> ExpertSession:
        """A backend for steps that must be done by `deadline` (time.monotonic()), on the traces of its requests.

        `fault` is a test hook, told to the shards with the hop at which it is due.
        """
        return ExpertSession(self._flow, deadline, traceparents, fault)

    def finish(self, traceparents: Sequence[str]) -> None:
        """These requests make no more hops: shards end their spans. Any thread."""
        if traceparents and self._has_experts:
            self._loop.call_soon_threadsafe(self._finish, tuple(traceparents))

    def _finish(self, traceparents: Sequence[str]) -> None:
        for link in self._peers.links:
            link.finish(traceparents)

    def on_answer(self, hop: Hop, response: pb.ForwardResponse) -> None:
        """LinkOwner."""
        self._flow.on_answer(hop, response)

    def on_link_change(self) -> None:
        """LinkOwner."""
        self._peers.notice()
        self._flow.wake()
