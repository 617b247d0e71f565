"""The composition root of a decode worker: the one place that knows concrete classes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio

from meshfire.api.router.v1 import work_service_pb2 as work_pb
from meshfire.kv.block_pool import BlockPool
from meshfire.kv.store import KvStore
from meshfire.model import registry as models
from meshfire.model.experts import LocalExperts as InProcessExperts
from meshfire.model.interface import CausalLM
from meshfire.rpc import geometry as geometry_codec
from meshfire.runtime.model_thread import ModelThread
from meshfire.runtime.serve import Mesh, Service
from meshfire.sched.policy import Scheduler
from meshfire.worker.experts import ExpertMesh
from meshfire.worker.link import WorkerLink
from meshfire.worker.ports import Experts, LocalExperts
from services.decode.config import DecodeSettings
from services.decode.engine import DecodeEngine, Identity
from services.decode.instruments import DecodeInstruments
from services.decode.kv_reader import KvReader
from services.decode.stepper import Stepper
from services.decode.table import LeaseTable
from services.decode.wire import WorkerFacts


@asynccontextmanager
async def build(settings: DecodeSettings, mesh: Mesh) -> AsyncIterator[Service]:
    """Load the model, find the experts, connect to the routers."""
    worker_id = f"{mesh.instance_id}.{uuid.uuid4().hex[:8]}"
    async with AsyncExitStack() as stack:
        thread = ModelThread("decode-model", settings.num_threads)
        stack.push_async_callback(asyncio.to_thread, thread.close)
        facts = await thread.run(models.describe, settings.model_dir, dense_slices=settings.dense_slices)
        model = await thread.run(
            models.load,
            settings.model_dir,
            dense_slices=settings.dense_slices,
            block_tokens=settings.block_tokens,
        )
        experts = await stack.enter_async_context(_experts(settings, mesh, facts, worker_id))
        parts = _Parts(settings, mesh, facts, model, thread, experts, worker_id)
        link = WorkerLink(parts.hello(), parts.engine, mesh.registry, mesh.channels)
        tasks = [
            mesh.tasks.create_task(parts.engine.run(link), name="decode-engine"),
            mesh.tasks.create_task(link.run(), name="worker-link"),
        ]
        # Before the thread and the experts that they use go away.
        stack.push_async_callback(_stopped, tasks)
        yield parts.service()


async def _stopped(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@asynccontextmanager
async def _experts(
    settings: DecodeSettings, mesh: Mesh, facts: models.ModelFacts, worker_id: str
) -> AsyncIterator[Experts]:
    """The mesh's expert shards once all are found, or this process's own experts."""
    if settings.experts == "local" or not any(facts.experts.num_experts):
        source = models.open_experts(settings.model_dir, dense_slices=settings.dense_slices)
        yield LocalExperts(InProcessExperts(source))
        return
    async with ExpertMesh.open(
        settings.model, facts.revision, facts.experts, mesh.registry, mesh.channels, worker_id
    ) as experts:
        await experts.ready()
        yield experts


class _Parts:
    """The worker's parts, wired."""

    def __init__(
        self,
        settings: DecodeSettings,
        mesh: Mesh,
        facts: models.ModelFacts,
        model: CausalLM,
        thread: ModelThread,
        experts: Experts,
        worker_id: str,
    ) -> None:
        self._settings, self._mesh, self._facts, self._worker_id = settings, mesh, facts, worker_id
        geometry = model.geometry
        store = KvStore(geometry, settings.blocks_of(geometry))
        pool = BlockPool(store.num_blocks)
        scheduler = Scheduler(
            pool,
            block_tokens=geometry.block_tokens,
            max_active=settings.max_batch,
            max_waiting=settings.max_waiting,
        )
        self._geometry = geometry
        self._limits = WorkerFacts(
            model=settings.model,
            vocab_size=model.vocab_size,
            max_context_tokens=min(model.context_tokens, store.num_blocks * geometry.block_tokens),
            end_token_ids=facts.end_token_ids,
            generation_defaults=facts.generation_defaults,
            hooks_on=mesh.test_hooks,
        )
        table = LeaseTable(scheduler)
        instruments = DecodeInstruments(mesh.telemetry.meter)
        instruments.observe(
            num_blocks=pool.num_blocks,
            num_free=lambda: pool.num_free,
            num_running=lambda: scheduler.num_active,
            num_waiting=lambda: scheduler.num_waiting,
        )
        reader = KvReader(
            mesh.channels,
            store,
            reader_id=worker_id,
            hidden_size=model.hidden_size,
            read_timeout_s=settings.read_timeout_s,
        )
        stepper = Stepper(model, store, thread, experts, table, settings.step_timeout_s, instruments)
        identity = Identity(worker_id, mesh.instance_id, self._limits, facts.revision, geometry)
        self.engine = DecodeEngine(identity, table, reader, stepper, experts, mesh.telemetry.tracer, instruments)

    def hello(self) -> work_pb.WorkerHello:
        """Who this worker is, for the routers."""
        return work_pb.WorkerHello(
            worker_id=self._worker_id,
            role=work_pb.WORKER_ROLE_DECODE,
            model=self._settings.model,
            model_revision=self._facts.revision,
            geometry=geometry_codec.to_wire(self._geometry),
            address=self._mesh.address,
            context_tokens=self._limits.max_context_tokens,
            vocab_size=self._limits.vocab_size,
            end_token_ids=self._facts.end_token_ids,
        )

    def service(self) -> Service:
        """What the runtime serves: nothing but health, for all work is pulled."""
        metadata = {
            "model": self._settings.model,
            "model_revision": self._facts.revision,
            "worker_id": self._worker_id,
        }
        return Service(_add_nothing, (), metadata, self.engine.drain)


def _add_nothing(server: grpc.aio.Server) -> None:
    """A decode worker has no RPCs of its own."""
