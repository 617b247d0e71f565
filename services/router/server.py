"""The router's gRPC surface and its composition root. Wire to domain only; decisions live in the files beside it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc

from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.api.router.v1 import inference_service_pb2_grpc as rpc
from meshfire.api.router.v1 import job_service_pb2_grpc as job_rpc
from meshfire.api.router.v1 import work_service_pb2 as work_pb
from meshfire.api.router.v1 import work_service_pb2_grpc as work_rpc
from meshfire.errors import BadInput
from meshfire.metering.prices import PriceTable
from meshfire.runtime.gate import Gate
from meshfire.runtime.serve import Mesh, Service
from meshfire.store.database import Database
from meshfire.store.ledger import Ledger
from services.router import wire
from services.router.active import Timing
from services.router.admission import Admission, Call
from services.router.billing import payer_in
from services.router.books import LedgerBooks, NoBooks, close_books
from services.router.config import RouterSettings
from services.router.desk import Desk
from services.router.generate import Parts, generate
from services.router.hooks import hooks_in
from services.router.instruments import Instruments
from services.router.jobs.system import job_system
from services.router.local_prompts import LocalPrompts
from services.router.models import served_models, wait_for_model
from services.router.response_stream import ResponseStream
from services.router.tokenizers import Tokenizers
from services.router.validation import check_prompt
from services.router.work_streams import WorkStream

_log = logging.getLogger(__name__)

INFERENCE_SERVICE = "meshfire.api.router.v1.InferenceService"
WORK_SERVICE = "meshfire.api.router.v1.WorkService"
JOB_SERVICE = "meshfire.api.router.v1.JobService"
TRACEPARENT_HEADER = "traceparent"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class InferenceServicer(rpc.InferenceServiceServicer):
    """The public API."""

    def __init__(self, parts: Parts, settings: RouterSettings, tasks: asyncio.TaskGroup, *, test_hooks: bool) -> None:
        self._parts = parts
        self._settings = settings
        self._tasks = tasks
        self._test_hooks = test_hooks
        self.gate = Gate("router")

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        metadata = list(context.invocation_metadata() or ())
        hooks = hooks_in(metadata, allowed=self._test_hooks)
        traceparent = str(dict(metadata).get(TRACEPARENT_HEADER, ""))
        call = Call(request, hooks, self._deadline_s(context), traceparent, payer_in(metadata))

        async def produce(emit: Callable[[pb.GenerateResponse], Awaitable[None]]) -> None:
            with self.gate.entered():
                await generate(self._parts, call, emit)

        stream = ResponseStream(self._tasks, produce, name="generate")
        _when_over(context, stream.stop)
        async for response in stream:
            yield response

    async def CountTokens(self, request: pb.CountTokensRequest, context: Context) -> pb.CountTokensResponse:
        if not request.model:
            raise BadInput("model is empty", field="model")
        check_prompt(request)
        admission = self._parts.admission
        await wait_for_model(admission.desk.workers, request.model, self._settings.worker_wait_s)
        traceparent = dict(context.invocation_metadata() or ()).get(TRACEPARENT_HEADER, "")
        encoded = await admission.tokenizers.tokenize(wire.tokenize_request_from(request), str(traceparent))
        return pb.CountTokensResponse(num_tokens=len(encoded.token_ids))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        found = served_models(self._parts.admission.desk.workers)
        return pb.ListModelsResponse(models=[wire.model_to(facts) for facts in found])

    def _deadline_s(self, context: Context) -> float:
        """When the request must have ended, of the loop's clock: in time to still tell the caller why."""
        left_s = self._settings.default_deadline_s
        callers_s = context.time_remaining()
        if callers_s is not None:
            left_s = min(left_s, callers_s - min(self._settings.deadline_margin_s, callers_s / 10))
        return asyncio.get_running_loop().time() + left_s


class WorkServicer(work_rpc.WorkServiceServicer):
    """The workers' side."""

    def __init__(self, desk: Desk, router_id: str, tasks: asyncio.TaskGroup) -> None:
        self._desk = desk
        self._router_id = router_id
        self._tasks = tasks
        self._streams: set[WorkStream] = set()

    async def Work(
        self, request_iterator: AsyncIterator[work_pb.WorkRequest], context: Context
    ) -> AsyncIterator[work_pb.WorkResponse]:
        stream = WorkStream(self._desk, self._router_id, request_iterator)
        reader = self._tasks.create_task(stream.read(), name="work-stream")
        self._streams.add(stream)
        reader.add_done_callback(lambda _: self._streams.discard(stream))
        _when_over(context, reader.cancel)
        try:
            async for response in stream.responses():
                yield response
        finally:
            reader.cancel()

    def close(self) -> None:
        """End all streams."""
        for stream in tuple(self._streams):
            stream.close()


def _when_over(context: Context, action: Callable[[], object]) -> None:
    """Call `action` when the call has ended, however it did."""
    context.add_done_callback(lambda _: action())  # type: ignore[arg-type]  # the stubs want a subclass


@asynccontextmanager
async def build(settings: RouterSettings, mesh: Mesh) -> AsyncIterator[Service]:
    """The composition root: the one place that knows concrete classes."""
    desk = Desk(
        max_requests=settings.max_queued_requests,
        max_tokens=settings.max_queued_prompt_tokens,
        clock=asyncio.get_running_loop().time,
        ageing_s=settings.ageing_s,
        local_prompts=LocalPrompts(settings.local_prefill_max_tokens, settings.models_without_prefill),
    )
    tokenizers = Tokenizers(
        mesh.registry, mesh.channels, timeout_s=settings.tokenizer_timeout_s, wait_s=settings.worker_wait_s
    )
    database = await Database.open(settings.store_url) if settings.store_url else None
    books = NoBooks() if database is None else LedgerBooks(Ledger(database))
    parts = Parts(
        admission=Admission(desk, tokenizers, mesh.telemetry.tracer, settings.worker_wait_s),
        instruments=Instruments(mesh.telemetry.meter, desk.queue_depths),
        timing=Timing(settings.offer_margin_s, settings.offer_timeout_s, settings.retry_pause_max_s),
        prices=PriceTable.from_file(settings.prices),
        books=books,
    )
    inference = InferenceServicer(parts, settings, mesh.tasks, test_hooks=mesh.test_hooks)
    # New at each start: a worker must not take a restarted router for the one whose leases it holds.
    work = WorkServicer(desk, f"{mesh.instance_id}-{uuid.uuid4().hex[:8]}", mesh.tasks)
    background = [mesh.tasks.create_task(tokenizers.run(), name="tokenizers")]
    if isinstance(books, LedgerBooks):
        background.append(mesh.tasks.create_task(books.run(), name="ledger"))
    system = None if database is None else job_system(settings, database, parts)
    job_loops = [mesh.tasks.create_task(loop(), name=name) for name, loop in (system.loops if system else {}).items()]

    def add_to(server: grpc.aio.Server) -> None:
        rpc.add_InferenceServiceServicer_to_server(inference, server)
        work_rpc.add_WorkServiceServicer_to_server(work, server)
        if system is not None:
            job_rpc.add_JobServiceServicer_to_server(system.servicer, server)

    async def drain() -> None:
        # Jobs go back to the store before the workers' streams end: another router may go on with them at once.
        await _stop(job_loops)
        await inference.gate.close()
        work.close()

    try:
        names = (INFERENCE_SERVICE, WORK_SERVICE, *((JOB_SERVICE,) if system else ()))
        yield Service(add_to, names, {}, drain)
    finally:
        await _stop(job_loops)
        for task in background:
            task.cancel()
        if database is not None and isinstance(books, LedgerBooks):
            await close_books(books, database)


async def _stop(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
