"""What every worker with a model starts with: an id, the model on its thread, its experts, its introduction.

Knows neither prompts nor sequences: what is done with the model is the service's.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.kv.store import KvStore
from meshfire.model import registry as models
from meshfire.model.experts import LocalExperts as InProcessExperts
from meshfire.model.halves import overlapped
from meshfire.model.interface import CausalLM, KvGeometry
from meshfire.parallel.ranks import ModelOptions, open_ranks
from meshfire.rpc import geometry as geometry_codec
from meshfire.runtime.model_thread import ModelThread
from meshfire.runtime.serve import Mesh
from meshfire.worker.experts import ExpertMesh
from meshfire.worker.ports import Experts, LocalExperts
from meshfire.worker.settings import ModelWorkerSettings


@dataclass(frozen=True)
class ModelWorker:
    """A loaded model in the mesh."""

    #: instance id and a new suffix at each start: routers must not take a restarted worker for the one that died
    worker_id: str
    settings: ModelWorkerSettings
    mesh: Mesh
    facts: models.ModelFacts
    model: CausalLM
    #: its KV; the only one that `model` may be given
    store: KvStore
    thread: ModelThread
    experts: Experts

    def hello(self, role: pb.WorkerRole.ValueType, context_tokens: int) -> pb.WorkerHello:
        """Who this worker is, for the routers. `context_tokens`: of prompt and output at most."""
        return pb.WorkerHello(
            worker_id=self.worker_id,
            role=role,
            model=self.settings.model,
            model_revision=self.facts.revision,
            geometry=geometry_codec.to_wire(self.model.geometry),
            address=self.mesh.address,
            context_tokens=context_tokens,
            vocab_size=self.model.vocab_size,
            end_token_ids=self.facts.end_token_ids,
        )

    @property
    def metadata(self) -> Mapping[str, str]:
        """What discovery tells others of it."""
        return {
            "model": self.settings.model,
            "model_revision": self.facts.revision,
            "worker_id": self.worker_id,
        }


@asynccontextmanager
async def model_worker(name: str, settings: ModelWorkerSettings, mesh: Mesh) -> AsyncIterator[ModelWorker]:
    """Load the model on its own thread and find its experts. Raises CheckpointError, ModelMismatch."""
    worker_id = f"{mesh.instance_id}.{uuid.uuid4().hex[:8]}"
    async with AsyncExitStack() as stack:
        thread = ModelThread(f"{name}-model", settings.num_threads)
        stack.push_async_callback(asyncio.to_thread, thread.close)
        facts = await thread.run(
            models.describe, settings.model_dir, dense_slices=settings.dense_slices, compute=settings.compute
        )
        model, store = await stack.enter_async_context(_model(settings, mesh, facts, thread))
        experts = await stack.enter_async_context(_experts(settings, mesh, facts, worker_id))
        yield ModelWorker(worker_id, settings, mesh, facts, model, store, thread, experts)


@asynccontextmanager
async def _model(
    settings: ModelWorkerSettings, mesh: Mesh, facts: models.ModelFacts, thread: ModelThread
) -> AsyncIterator[tuple[CausalLM, KvStore]]:
    """The model in this process or on several ranks, and the memory for its KV."""
    if settings.tensor_parallel == 1:
        model = await thread.run(
            models.load,
            settings.model_dir,
            dense_slices=settings.dense_slices,
            block_tokens=settings.block_tokens,
            compute=settings.compute,
        )
        if settings.experts == "mesh":  # experts in this process leave nothing to wait for
            model = overlapped(model, settings.overlap_from)
        yield model, KvStore(model.geometry, settings.blocks_of(model.geometry))
        return
    columns = models.kv_columns(settings.model_dir)
    geometry = KvGeometry(len(facts.experts.num_experts), settings.block_tokens, columns.row_width)
    options = ModelOptions(settings.model_dir, settings.dense_slices, settings.block_tokens, settings.compute)
    async with open_ranks(
        options,
        geometry,
        settings.blocks_of(geometry),
        thread,
        size=settings.tensor_parallel,
        num_threads=settings.num_threads,
        timeout_s=settings.rank_timeout_s,
    ) as ranked:
        watch = mesh.tasks.create_task(ranked.watch(), name="ranks")
        try:
            yield ranked.model, ranked.store
        finally:
            watch.cancel()


@asynccontextmanager
async def _experts(
    settings: ModelWorkerSettings, mesh: Mesh, facts: models.ModelFacts, worker_id: str
) -> AsyncIterator[Experts]:
    """The mesh's expert shards once all are found, or this process's own experts."""
    if settings.experts == "local" or not any(facts.experts.num_experts):
        source = models.open_experts(settings.model_dir, dense_slices=settings.dense_slices, compute=settings.compute)
        yield LocalExperts(InProcessExperts(source))
        return
    async with ExpertMesh.open(
        settings.model,
        facts.revision,
        facts.experts,
        mesh.registry,
        mesh.channels,
        worker_id,
        transport=settings.hop_transport,
    ) as experts:
        await experts.ready()
        yield experts
