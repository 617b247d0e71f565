"""The composition root of a decode worker: the one place that knows concrete classes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio

from meshfire.api.router.v1 import work_service_pb2 as work_pb
from meshfire.kv.block_pool import BlockPool
from meshfire.kv.journal import BlockJournal
from meshfire.runtime.serve import Mesh, Service
from meshfire.sched.parts import ChunkBudget
from meshfire.sched.policy import Scheduler
from meshfire.worker.link import WorkerLink
from meshfire.worker.model_worker import ModelWorker, model_worker
from services.decode.config import DecodeSettings
from services.decode.engine import DecodeEngine, Identity
from services.decode.instruments import DecodeInstruments
from services.decode.kv_reader import KvReader
from services.decode.rules import RuleBook
from services.decode.speculation import Speculation
from services.decode.stepper import Stepper
from services.decode.table import LeaseTable
from services.decode.wire import WorkerFacts


@asynccontextmanager
async def build(settings: DecodeSettings, mesh: Mesh) -> AsyncIterator[Service]:
    """Load the model, find the experts, connect to the routers."""
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(model_worker("decode", settings, mesh))
        rules = await asyncio.to_thread(RuleBook.load, settings.model_dir, worker.model.vocab_size)
        stack.push_async_callback(asyncio.to_thread, rules.close)
        parts = _Parts(settings, worker, rules)
        link = WorkerLink(parts.hello(), parts.engine, mesh.registry, mesh.channels, journal=parts.journal)
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


class _Parts:
    """The worker's parts, wired."""

    def __init__(self, settings: DecodeSettings, worker: ModelWorker, rules: RuleBook) -> None:
        self._worker = worker
        mesh, model, facts = worker.mesh, worker.model, worker.facts
        geometry = model.geometry
        store = worker.store
        self.journal = BlockJournal()
        pool = BlockPool(store.num_blocks, self.journal)
        scheduler = Scheduler(
            pool,
            block_tokens=geometry.block_tokens,
            max_active=settings.max_batch,
            max_waiting=settings.max_waiting,
        )
        self._limits = WorkerFacts(
            model=settings.model,
            vocab_size=model.vocab_size,
            max_context_tokens=min(model.context_tokens, store.num_blocks * geometry.block_tokens),
            end_token_ids=facts.end_token_ids,
            generation_defaults=facts.generation_defaults,
            hooks_on=mesh.test_hooks,
        )
        budget = ChunkBudget(settings.chunk_tokens, settings.idle_chunk_tokens)
        table = LeaseTable(scheduler, budget, Speculation.named(settings.speculation, settings.max_draft_tokens))
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
            reader_id=worker.worker_id,
            hidden_size=model.hidden_size,
            read_timeout_s=settings.read_timeout_s,
        )
        stepper = Stepper(model, store, worker.thread, worker.experts, table, settings.step_timeout_s, instruments)
        identity = Identity(worker.worker_id, mesh.instance_id, self._limits, facts.revision, geometry)
        tracer = mesh.telemetry.tracer
        self.engine = DecodeEngine(identity, table, reader, stepper, rules, worker.experts, tracer, instruments)

    def hello(self) -> work_pb.WorkerHello:
        """Who this worker is, for the routers."""
        return self._worker.hello(work_pb.WORKER_ROLE_DECODE, self._limits.max_context_tokens)

    def service(self) -> Service:
        """What the runtime serves: nothing but health, for all work is pulled."""
        return Service(_add_nothing, (), self._worker.metadata, self.engine.drain)


def _add_nothing(server: grpc.aio.Server) -> None:
    """A decode worker has no RPCs of its own."""
