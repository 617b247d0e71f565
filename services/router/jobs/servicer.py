"""JobService: wire to store. Decides nothing but sizes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc

from meshfire.api.router.v1 import job_service_pb2 as pb
from meshfire.api.router.v1 import job_service_pb2_grpc as rpc
from meshfire.errors import BadInput
from meshfire.store.job_outbox import JobOutbox
from meshfire.store.job_values import NewJob
from meshfire.store.jobs import Jobs
from services.router.billing import Payer, payer_in
from services.router.jobs import wire

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

MAX_JOB_BYTES = 10 * 1024 * 1024
MAX_WINDOW_S = 7 * 86_400
MAX_PAGE = 100
#: items of one message of results
_ITEMS_PER_MESSAGE = 64
#: a watcher looks for events of other routers so often
_WATCH_S = 0.5


class JobServicer(rpc.JobServiceServicer):
    """`on_submitted` is called when a job was taken."""

    def __init__(
        self, jobs: Jobs, outbox: JobOutbox, *, default_window_s: float, on_submitted: Callable[[], None]
    ) -> None:
        self._jobs = jobs
        self._outbox = outbox
        self._default_window_s = default_window_s
        self._on_submitted = on_submitted

    async def SubmitJob(self, request: pb.SubmitJobRequest, context: Context) -> pb.SubmitJobResponse:
        _check(request)
        payer = _payer(context)
        window_s = request.completion_window_s or self._default_window_s
        items = tuple(wire.new_item(item) for item in request.items)
        new = NewJob(payer.account_id, payer.key_id, request.model, request.label, items, time.time() + window_s)
        job = await self._jobs.submit(new)
        self._on_submitted()
        return pb.SubmitJobResponse(job=wire.job_to(job))

    async def GetJob(self, request: pb.GetJobRequest, context: Context) -> pb.GetJobResponse:
        return pb.GetJobResponse(job=wire.job_to(await self._jobs.job(_payer(context).account_id, request.job_id)))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsResponse:
        limit = request.limit or 20
        if not 1 <= limit <= MAX_PAGE:
            raise BadInput(f"limit is {limit}, expected 1 to {MAX_PAGE}", field="limit")
        account_id = _payer(context).account_id
        found = await self._jobs.list_jobs(account_id, after=request.after or None, limit=limit + 1)
        jobs = [wire.job_to(job) for job in found[:limit]]
        return pb.ListJobsResponse(jobs=jobs, has_more=len(found) > limit)

    async def ListJobItems(
        self, request: pb.ListJobItemsRequest, context: Context
    ) -> AsyncIterator[pb.ListJobItemsResponse]:
        account_id, first = _payer(context).account_id, 0
        while True:
            items = await self._jobs.items(account_id, request.job_id, first=first, limit=_ITEMS_PER_MESSAGE)
            if not items:
                return
            yield pb.ListJobItemsResponse(items=[wire.item_to(item) for item in items])
            first = items[-1].position + 1

    async def CancelJob(self, request: pb.CancelJobRequest, context: Context) -> pb.CancelJobResponse:
        job = await self._jobs.cancel(_payer(context).account_id, request.job_id)
        return pb.CancelJobResponse(job=wire.job_to(job))

    async def WatchJobs(self, request: pb.WatchJobsRequest, context: Context) -> AsyncIterator[pb.WatchJobsResponse]:
        account_id = _payer(context).account_id
        last = request.after_event_id or await self._outbox.last_id()
        while True:
            events = await self._outbox.after(last, account_id)
            if events:
                last = events[-1].event_id
                yield pb.WatchJobsResponse(events=[wire.event_to(event) for event in events])
            else:
                await asyncio.sleep(_WATCH_S)


def _payer(context: Context) -> Payer:
    return payer_in(context.invocation_metadata() or ())


def _check(request: pb.SubmitJobRequest) -> None:
    if not request.model:
        raise BadInput("model is empty", field="model")
    num_bytes = request.ByteSize()
    if num_bytes > MAX_JOB_BYTES:
        raise BadInput(f"the job has {num_bytes} bytes, expected at most {MAX_JOB_BYTES}", field="items")
    if not 0 <= request.completion_window_s <= MAX_WINDOW_S:
        what = f"completion_window_s is {request.completion_window_s}, expected up to {MAX_WINDOW_S}"
        raise BadInput(what, field="completion_window_s")
    for position, item in enumerate(request.items):
        if not item.calls and not item.HasField("refusal"):
            raise BadInput("an item needs a call", field=f"items[{position}].calls")
        for index, call in enumerate(item.calls):
            if call.request.model != request.model:
                what = f"the call's model is {call.request.model!r}, the job's {request.model!r}"
                raise BadInput(what, field=f"items[{position}].calls[{index}].request.model")
