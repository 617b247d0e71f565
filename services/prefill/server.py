"""The composition root of a prefill worker: the one place that knows concrete classes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio

from meshfire.api.prefill.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from meshfire.api.router.v1 import work_service_pb2 as work_pb
from meshfire.kv.block_pool import BlockPool
from meshfire.kv.journal import BlockJournal
from meshfire.kv.lease import LeaseTimeouts
from meshfire.runtime.serve import Mesh, Service
from meshfire.worker.link import WorkerLink
from meshfire.worker.model_worker import ModelWorker, model_worker
from services.prefill.config import PrefillSettings
from services.prefill.engine import Admission, PrefillEngine
from services.prefill.instruments import PrefillInstruments
from services.prefill.prompt import PromptLimits
from services.prefill.prompt_pass import PromptPass
from services.prefill.servicer import PrefillServicer
from services.prefill.shelf import KvShelf
from services.prefill.under_way import UnderWay

SERVICE_NAME = prefill_service_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name


@asynccontextmanager
async def build(settings: PrefillSettings, mesh: Mesh) -> AsyncIterator[Service]:
    """Load the model, find the experts, connect to the routers."""
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(model_worker("prefill", settings, mesh))
        parts = _Parts(settings, worker)
        stack.push_async_callback(parts.engine.close)
        link = WorkerLink(parts.hello(), parts.engine, mesh.registry, mesh.channels, journal=parts.journal)
        parts.engine.attach(link)
        mesh.tasks.create_task(link.run(), name="worker-link")
        mesh.tasks.create_task(parts.shelf.expire(), name="kv-expiry")
        yield parts.service()


class _Parts:
    """The worker's parts, wired."""

    def __init__(self, settings: PrefillSettings, worker: ModelWorker) -> None:
        self._worker = worker
        mesh, model = worker.mesh, worker.model
        self._store = worker.store
        self.journal = BlockJournal()
        pool = BlockPool(self._store.num_blocks, self.journal)
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
            model_revision=worker.facts.revision,
            store=self._store,
            pool=pool,
            under_way=UnderWay(),
            thread=worker.thread,
            experts=worker.experts,
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
        context_tokens = min(self._limits.context_tokens, self._limits.pool_tokens)
        return self._worker.hello(work_pb.WORKER_ROLE_PREFILL, context_tokens)

    def service(self) -> Service:
        """What the runtime serves."""
        tracer, revision = self._worker.mesh.telemetry.tracer, self._worker.facts.revision
        servicer = PrefillServicer(self.shelf, self._store, revision, tracer, self._instruments)

        def add_to(server: grpc.aio.Server) -> None:
            prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)

        return Service(add_to, (SERVICE_NAME,), self._worker.metadata, self.engine.drain)
