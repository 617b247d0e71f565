"""Calls of JobService for one visitor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc.aio

from meshfire.api.router.v1 import job_service_pb2 as pb
from meshfire.api.router.v1 import job_service_pb2_grpc as rpc
from services.gateway.access.visitor import Visitor
from services.gateway.routers import Routers

T = TypeVar("T")


class JobClient:
    """`timeout_s` bounds each call."""

    def __init__(self, routers: Routers, timeout_s: float) -> None:
        self._routers = routers
        self._timeout_s = timeout_s

    async def submit(self, visitor: Visitor, request: pb.SubmitJobRequest) -> pb.Job:
        """Take a job. Never repeated at another router by itself: it might then be there twice."""
        response: pb.SubmitJobResponse = await self._call(
            visitor, lambda stub, **more: stub.SubmitJob(request, **more), tries=1
        )
        return response.job

    async def job(self, visitor: Visitor, job_id: str) -> pb.Job:
        """Raises NotFound."""
        request = pb.GetJobRequest(job_id=job_id)
        response: pb.GetJobResponse = await self._call(visitor, lambda stub, **more: stub.GetJob(request, **more))
        return response.job

    async def list_jobs(self, visitor: Visitor, after: str, limit: int) -> pb.ListJobsResponse:
        """Newest first."""
        request = pb.ListJobsRequest(after=after, limit=limit)
        response: pb.ListJobsResponse = await self._call(visitor, lambda stub, **more: stub.ListJobs(request, **more))
        return response

    async def cancel(self, visitor: Visitor, job_id: str) -> pb.Job:
        """Raises NotFound."""
        request = pb.CancelJobRequest(job_id=job_id)
        response: pb.CancelJobResponse = await self._call(visitor, lambda stub, **more: stub.CancelJob(request, **more))
        return response.job

    async def results(self, visitor: Visitor, job_id: str) -> list[pb.JobItemResult]:
        """All items in order. Raises NotFound."""
        request = pb.ListJobItemsRequest(job_id=job_id)

        async def collect(stub: rpc.JobServiceAsyncStub, **more: object) -> list[pb.JobItemResult]:
            messages = stub.ListJobItems(request, **more)  # type: ignore[arg-type]
            return [item async for message in messages for item in message.items]

        return await self._call(visitor, collect)

    async def _call(self, visitor: Visitor, ask: Callable[..., Awaitable[T]], tries: int | None = None) -> T:
        async def at(channel: grpc.aio.Channel, left_s: float) -> T:
            stub = rpc.JobServiceStub(channel)
            return await ask(stub, metadata=tuple(visitor.metadata(pays_for_prompt=True)), timeout=left_s)

        deadline = asyncio.get_running_loop().time() + self._timeout_s
        return await self._routers.at_any(at, deadline, tries=tries)
