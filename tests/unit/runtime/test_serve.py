"""A service process from start to drain, over a real loopback server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshfire.api.prefill.v1 import prefill_service_pb2 as pb
from meshfire.api.prefill.v1 import prefill_service_pb2_grpc as rpc
from meshfire.discovery.memory import MemoryRegistry, MemorySpace
from meshfire.errors import KvExpired, NoFreeBlocks
from meshfire.rpc.channels import ChannelPool
from meshfire.runtime.serve import Mesh, Service, running
from meshfire.runtime.settings import ServiceSettings

NAME = "meshfire.api.prefill.v1.PrefillService"


class Servicer(rpc.PrefillServiceServicer):
    async def ReadKv(self, request, context):
        yield pb.ReadKvResponse(trailer=pb.KvTrailer(num_frames=1))
        raise KvExpired("kv-1 is gone", metadata={"kv_lease_id": "kv-1"})

    async def ReleaseKv(self, request, context):
        if request.kv_lease_id == "busy":
            raise NoFreeBlocks("no block", retry_after_s=2.0)
        raise ZeroDivisionError("secret detail")


class Recorder:
    def __init__(self) -> None:
        self.events: list[str] = []

    @asynccontextmanager
    async def build(self, settings: ServiceSettings, mesh: Mesh) -> AsyncIterator[Service]:
        async def drain() -> None:
            self.events.append("drain")

        mesh.tasks.create_task(asyncio.Event().wait(), name="loop-of-the-service")
        try:
            yield Service(
                lambda server: rpc.add_PrefillServiceServicer_to_server(Servicer(), server),
                [NAME],
                {"model": "m"},
                drain,
            )
        finally:
            self.events.append("closed")


def settings() -> ServiceSettings:
    return ServiceSettings(instance_id="prefill-7", discovery_lag_s=0.0)


async def test_a_service_is_healthy_and_registered_while_it_runs_and_drains_before_it_closes() -> None:
    registry, recorder = MemoryRegistry(MemorySpace()), Recorder()
    async with running("prefill", recorder.build, settings(), registry=registry) as mesh:
        found = await anext(registry.watch("meshfire-prefill"))
        assert [(one.instance_id, one.address, dict(one.metadata)) for one in found] == [
            ("prefill-7", mesh.address, {"model": "m"})
        ]
        async with grpc.aio.insecure_channel(mesh.address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=NAME))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert recorder.events == ["drain", "closed"]
    assert await anext(registry.watch("meshfire-prefill")) == ()


async def test_an_error_of_a_servicer_is_raised_again_at_the_caller_with_its_details() -> None:
    pool = ChannelPool()
    async with running("prefill", Recorder().build, settings(), registry=MemoryRegistry(MemorySpace())) as mesh:
        stub = rpc.PrefillServiceStub(pool.get(mesh.address))
        with pytest.raises(NoFreeBlocks) as busy:
            await stub.ReleaseKv(pb.ReleaseKvRequest(kv_lease_id="busy"))
        frames = []
        with pytest.raises(KvExpired) as gone:
            async for frame in stub.ReadKv(pb.ReadKvRequest()):
                frames.append(frame)
        await pool.close()
    assert busy.value.retry_after_s == 2.0
    assert len(frames) == 1
    assert gone.value.metadata == {"kv_lease_id": "kv-1"}


async def test_an_unexpected_exception_becomes_internal_and_no_detail_leaks() -> None:
    async with running("prefill", Recorder().build, settings(), registry=MemoryRegistry(MemorySpace())) as mesh:
        async with grpc.aio.insecure_channel(mesh.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rpc.PrefillServiceStub(channel).ReleaseKv(pb.ReleaseKvRequest(kv_lease_id="x"))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value)


async def test_a_stream_that_its_caller_leaves_is_closed_at_once() -> None:
    """Also while it writes: the servicer's generator is not left to the garbage collector."""
    closed = asyncio.Event()

    class Endless(rpc.PrefillServiceServicer):
        async def ReadKv(self, request, context):
            try:
                while True:
                    yield pb.ReadKvResponse(block=pb.KvBlock(data=bytes(1 << 20)))
            finally:
                closed.set()

    @asynccontextmanager
    async def build(settings: ServiceSettings, mesh: Mesh) -> AsyncIterator[Service]:
        yield Service(lambda server: rpc.add_PrefillServiceServicer_to_server(Endless(), server), [NAME])

    pool = ChannelPool()
    async with running("prefill", build, settings(), registry=MemoryRegistry(MemorySpace())) as mesh:
        call = rpc.PrefillServiceStub(pool.get(mesh.address)).ReadKv(pb.ReadKvRequest())
        async for _ in call:
            break
        call.cancel()
        async with asyncio.timeout(5):
            await closed.wait()
        await pool.close()
