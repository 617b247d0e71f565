"""The composition root of a prefill worker: the one place that knows concrete classes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio

from meshfire.api.prefill.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from meshfire.api.router.v1 import work_service_pb2 as work_pb
from meshfire.kv.block_pool import BlockPool
from meshfire.kv.lease import LeaseTimeouts
from meshfire.kv.store import KvStore
from meshfire.model import registry as models
from meshfire.model.experts import LocalExperts as InProcessExperts
from meshfire.model.interface import CausalLM
from meshfire.rpc import geometry as geometry_codec
from meshfire.runtime.model_thread import ModelThread
from meshfire.runtime.serve import Mesh, Service
from meshfire.worker.experts import ExpertMesh
from meshfire.worker.link import WorkerLink
from meshfire.worker.ports import Experts, LocalExperts
from services.prefill.config import PrefillSettings
from services.prefill.engine import Admission, PrefillEngine
from services.prefill.instruments import PrefillInstruments
from services.prefill.prompt import PromptLimits
from services.prefill.prompt_pass import PromptPass
from services.prefill.servicer import PrefillServicer
from services.prefill.shelf import KvShelf

SERVICE_NAME = prefill_service_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name


@asynccontextmanager
async def build(settings: PrefillSettings, mesh: Mesh) -> AsyncIterator[Service]:
    """Load the model, find the experts, connect to the routers."""
    worker_id = f"{mesh.instance_id}.{uuid.uuid4().hex[:8]}"
    async with AsyncExitStack() as stack:
        thread = ModelThread("prefill-model", settings.num_threads)
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
        stack.push_async_callback(parts.engine.close)
        link = WorkerLink(parts.hello(), parts.engine, mesh.registry, mesh.channels)
        parts.engine.attach(link)
        mesh.tasks.create_task(link.run(), name="worker-link")
        mesh.tasks.create_task(parts.shelf.expire(), name="kv-expiry")
        yield parts.service()


@asynccontextmanager
async def _experts(
    settings: PrefillSettings, mesh: Mesh, facts: models.ModelFacts, worker_id: str
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
        settings: PrefillSettings,
        mesh: Mesh,
        facts: models.ModelFacts,
        model: CausalLM,
        thread: ModelThread,
        experts: Experts,
        worker_id: str,
    ) -> None:
        self._settings, self._mesh, self._facts, self._worker_id = settings, mesh, facts, worker_id
        self._store = KvStore(model.geometry, settings.blocks_of(model.geometry))
        pool = BlockPool(self._store.num_blocks)
        self._instruments = PrefillInstruments(mesh.telemetry.meter)
        timeouts = LeaseTimeouts(settings.offer_ttl_s, settings.grant_ttl_s, settings.read_ttl_s)
        self.shelf = KvShelf(
            pool,
            mesh.instance_id,
            timeouts,
            grant_wait_s=settings.grant_wait_s,
            on_freed=lambda: self.engine.update_credit(),
        )
        self._limits = PromptLimits(
            model.vocab_size, model.context_tokens, self._store.num_blocks * model.geometry.block_tokens
        )
        prompt_pass = PromptPass(
            model=model,
            model_revision=facts.revision,
            store=self._store,
            pool=pool,
            thread=thread,
            experts=experts,
            chunk_tokens=settings.chunk_tokens,
            instance_id=mesh.instance_id,
            tracer=mesh.telemetry.tracer,
            instruments=self._instruments,
        )
        admission = Admission(self._limits, settings.max_leases, mesh.test_hooks)
        self.engine = PrefillEngine(admission, prompt_pass, self.shelf, mesh.tasks)
        self._instruments.observe(
            num_blocks=pool.num_blocks, num_free=lambda: pool.num_free, num_leases=lambda: len(self.shelf)
        )

    def hello(self) -> work_pb.WorkerHello:
        """Who this worker is, for the routers."""
        return work_pb.WorkerHello(
            worker_id=self._worker_id,
            role=work_pb.WORKER_ROLE_PREFILL,
            model=self._settings.model,
            model_revision=self._facts.revision,
            geometry=geometry_codec.to_wire(self._store.geometry),
            address=self._mesh.address,
            context_tokens=min(self._limits.context_tokens, self._limits.pool_tokens),
            vocab_size=self._limits.vocab_size,
            end_token_ids=self._facts.end_token_ids,
        )

    def service(self) -> Service:
        """What the runtime serves."""
        servicer = PrefillServicer(
            self.shelf, self._store, self._facts.revision, self._mesh.telemetry.tracer, self._instruments
        )

        def add_to(server: grpc.aio.Server) -> None:
            prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)

        metadata = {
            "model": self._settings.model,
            "model_revision": self._facts.revision,
            "worker_id": self._worker_id,
        }
        return Service(add_to, (SERVICE_NAME,), metadata, self.engine.drain)
