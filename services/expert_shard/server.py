"""ExpertShardService: wire ↔ domain, and the composition root of the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc.aio

from meshfire.api.expert_shard.v1 import expert_shard_service_pb2 as pb
from meshfire.api.expert_shard.v1 import expert_shard_service_pb2_grpc as rpc
from meshfire.errors import Draining, MeshfireError, UnknownExpert
from meshfire.model.interface import ExpertLayout
from meshfire.model.registry import describe, open_experts
from meshfire.placement.shard_map import Expert, ExpertSpan, spans_of
from meshfire.rpc import lane_socket
from meshfire.runtime.model_thread import ModelThread
from meshfire.runtime.serve import Mesh, Service
from meshfire.worker.faults import FIRST_EPOCH, rehearsed, strike
from services.expert_shard.compute_loop import ComputeLoop
from services.expert_shard.config import ExpertShardSettings
from services.expert_shard.core import ExpertStore
from services.expert_shard.epochs import EpochBook
from services.expert_shard.forwarder import Forwarder, cost_of, refusal, wants_answer
from services.expert_shard.instruments import ShardInstruments
from services.expert_shard.lane_desk import LaneDesk
from services.expert_shard.spans import SpanBook
from services.expert_shard.stream import ReadAhead

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ExpertShardService"].full_name
_CALLER_METADATA = "x-meshfire-caller"
_SWEEP_S = 0.5


class ExpertShardServicer(rpc.ExpertShardServiceServicer):
    """One shard. Ready-made parts come in; `build` makes them."""

    def __init__(
        self,
        settings: ExpertShardSettings,
        model_revision: str,
        store: ExpertStore,
        epochs: EpochBook,
        compute: ComputeLoop,
        local_socket: str,
        mesh: Mesh,
    ) -> None:
        self._settings = settings
        self._model_revision = model_revision
        self._store = store
        self._epochs = epochs
        self._compute = compute
        self._local_socket = local_socket
        self._forwarder = Forwarder(store)
        self._tracer = mesh.telemetry.tracer
        self._instruments = ShardInstruments(mesh.telemetry.meter, settings.shard_id)
        self._hooks_on = mesh.test_hooks
        self._tasks = mesh.tasks
        #: for callers on this machine, who do not come over the stream
        self.lanes = LaneDesk(
            compute,
            self._forwarder,
            self._instruments,
            self._new_book,
            epochs.serves,
            self._admit,
            asyncio.get_running_loop(),
            mesh.tasks,
            settings.span_silence_s,
        )
        self._streams: dict[ReadAhead, SpanBook] = {}
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def Forward(
        self, request_iterator: AsyncIterator[pb.ForwardRequest], context: Context
    ) -> AsyncIterator[pb.ForwardResponse]:
        """Answer hops in order until the caller leaves or the shard drains."""
        if self._draining:
            raise Draining(f"shard {self._settings.shard_id} stops")
        await context.send_initial_metadata(())  # tells the caller that the stream is up before it has asked anything
        stream = ReadAhead(request_iterator, self._settings.max_queued_hops)
        spans = self._new_book(_caller_of(context))
        reading = self._tasks.create_task(stream.run(), name="expert-stream-read")
        self._begin(stream, spans)
        try:
            async for request, arrived_ns in stream:
                if wants_answer(request):
                    response = await self._answer(request, arrived_ns)
                    cost = cost_of(request, response)
                    self._instruments.record(cost)
                    spans.record(request.traceparents, cost)
                    yield response
                spans.finish(list(request.finished_traceparents))
        finally:
            reading.cancel()
            self._end(stream, spans)

    async def DescribeShard(self, request: pb.DescribeShardRequest, context: Context) -> pb.DescribeShardResponse:
        """What is in memory and served now."""
        return pb.DescribeShardResponse(
            shard_id=self._settings.shard_id,
            model=self._settings.model,
            model_revision=self._model_revision,
            placement_epochs=self._epochs.epochs,
            experts=[_to_wire(span) for span in spans_of(self._store.experts)],
            weight_bytes=self._store.weight_bytes,
            hidden_size=self._store.layout.hidden_size,
            local_socket="" if self._draining else self._local_socket,
        )

    async def LoadExperts(self, request: pb.LoadExpertsRequest, context: Context) -> pb.LoadExpertsResponse:
        """Returns when they can be asked for."""
        await self._epochs.load(request.placement_epoch, _experts_in(request.experts, self._store.layout))
        return pb.LoadExpertsResponse(weight_bytes=self._store.weight_bytes)

    async def UnloadExperts(self, request: pb.UnloadExpertsRequest, context: Context) -> pb.UnloadExpertsResponse:
        """Frees memory at once; hops that run keep what they use until they end."""
        await self._epochs.unload(request.oldest_epoch, _experts_in(request.experts, self._store.layout))
        return pb.UnloadExpertsResponse(weight_bytes=self._store.weight_bytes)

    async def ReadLoad(self, request: pb.ReadLoadRequest, context: Context) -> pb.ReadLoadResponse:
        """Tokens per expert."""
        loads = sorted(self._store.loads().items())
        return pb.ReadLoadResponse(
            loads=[pb.ExpertLoad(layer=layer, expert=expert, num_tokens=count) for (layer, expert), count in loads]
        )

    async def sweep(self) -> None:
        """Close the spans of silent traces, for as long as the process runs."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            for spans in self._streams.values():
                spans.sweep(self._settings.span_silence_s)

    async def drain(self) -> None:
        """End every stream after the hops that it has sent; callers go to a replica or wait for the next process."""
        self._draining = True
        for stream in self._streams:
            stream.stop()
        await self._compute.run(self._compute.close_lanes, self.lanes)
        await self._idle.wait()

    async def _answer(self, request: pb.ForwardRequest, arrived_ns: int) -> pb.ForwardResponse:
        try:
            await self._admit(request.placement_epoch, request.fault)
        except MeshfireError as error:
            return refusal(request, error)
        return await self._compute.run(self._forwarder.answer, request, arrived_ns)

    async def _admit(self, epoch: int, fault: str) -> None:
        """Before a hop is computed. Raises StaleEpoch, TestHooksOff, BadInput."""
        await self._rehearse(fault)
        await self._epochs.admit(epoch, self._settings.epoch_wait_s)

    def _new_book(self, caller_id: str) -> SpanBook:
        return SpanBook(self._tracer, self._settings.shard_id, caller_id)

    async def _rehearse(self, text: str) -> None:
        """Test hook: strike this process if the fault names it. Raises TestHooksOff, BadInput."""
        fault = rehearsed(text, epoch=FIRST_EPOCH, hooks_on=self._hooks_on)
        if fault is not None and fault.aims_at("expert", self._settings.shard_id):
            await strike(fault)

    def _begin(self, stream: ReadAhead, spans: SpanBook) -> None:
        self._streams[stream] = spans
        self._idle.clear()

    def _end(self, stream: ReadAhead, spans: SpanBook) -> None:
        spans.close()
        del self._streams[stream]
        if not self._streams:
            self._idle.set()


@asynccontextmanager
async def build(settings: ExpertShardSettings, mesh: Mesh) -> AsyncIterator[Service]:
    """Load this shard's experts and serve them. Waits for the placement document unless `experts` names some."""
    facts = await asyncio.to_thread(
        describe, settings.model_dir, dense_slices=settings.dense_slices, compute=settings.compute
    )
    source = await asyncio.to_thread(
        open_experts, settings.model_dir, dense_slices=settings.dense_slices, compute=settings.compute
    )
    async with serving(settings, mesh, ExpertStore(source, facts.experts), facts.revision) as service:
        yield service


@asynccontextmanager
async def serving(
    settings: ExpertShardSettings, mesh: Mesh, store: ExpertStore, model_revision: str
) -> AsyncIterator[Service]:
    """`build` for a store that is already open: any source of weights."""
    epochs = EpochBook(
        store,
        mesh.registry,
        model=settings.model,
        model_revision=model_revision,
        shard_id=settings.shard_id,
        always=settings.own_experts(store.layout),
    )
    async with _computing(settings) as (compute, local_socket, thread):
        servicer = ExpertShardServicer(settings, model_revision, store, epochs, compute, local_socket, mesh)
        serving_hops = mesh.tasks.create_task(thread.run(compute.serve, servicer.lanes), name="expert-compute")
        try:
            await epochs.load_always()
            mesh.tasks.create_task(epochs.run(), name="expert-epochs")
            mesh.tasks.create_task(servicer.sweep(), name="expert-spans")
            if not settings.experts:
                await epochs.placed.wait()
            yield Service(
                add_to=lambda server: rpc.add_ExpertShardServiceServicer_to_server(servicer, server),
                names=(SERVICE_NAME,),
                metadata={"shard_id": settings.shard_id, "model": settings.model, "model_revision": model_revision},
                drain=servicer.drain,
            )
        finally:
            compute.stop()
            await serving_hops


@asynccontextmanager
async def _computing(settings: ExpertShardSettings) -> AsyncIterator[tuple[ComputeLoop, str, ModelThread]]:
    """The loop of the compute thread, the name of its local socket ("" = none), and the thread that is to run it."""
    listener, local_socket = None, ""
    if settings.hop_transport == "auto" and lane_socket.SUPPORTED:
        listener, local_socket = lane_socket.listen()
    with ModelThread("expert-model", settings.num_threads) as thread:
        yield ComputeLoop(listener), local_socket, thread


def _caller_of(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == _CALLER_METADATA:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""


def _to_wire(span: ExpertSpan) -> pb.ExpertRange:
    return pb.ExpertRange(layer=span.layer, first=span.first, count=span.count)


def _experts_in(ranges: Iterable[pb.ExpertRange], layout: ExpertLayout) -> frozenset[Expert]:
    found: set[Expert] = set()
    for one in ranges:
        num_experts = layout.num_experts[one.layer] if 0 <= one.layer < len(layout.num_experts) else 0
        if one.first < 0 or one.count < 0 or one.first + one.count > num_experts:
            last = one.first + one.count - 1
            raise UnknownExpert(
                f"layer {one.layer} has {num_experts} experts, got {one.first} to {last}", field="experts"
            )
        found |= ExpertSpan(one.layer, one.first, one.count).experts()
    return frozenset(found)
