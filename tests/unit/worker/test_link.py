"""The worker's link against a real WorkService whose router side each test plays itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.api.router.v1 import work_service_pb2_grpc as rpc
from meshfire.discovery.base import Instance
from meshfire.discovery.memory import MemoryRegistry, MemorySpace
from meshfire.errors import NoFreeBlocks
from meshfire.rpc.channels import ChannelPool
from meshfire.worker.link import WorkerLink
from meshfire.worker.outbox import Outbox

HELLO = pb.WorkerHello(worker_id="w", role=pb.WORKER_ROLE_DECODE, model="m")


@dataclass
class Stream:
    """One Work stream as the router sees it."""

    said: list[pb.WorkRequest] = field(default_factory=list)
    answers: asyncio.Queue[pb.WorkResponse | None] = field(default_factory=asyncio.Queue)
    reading: asyncio.Event = field(default_factory=asyncio.Event)

    def kinds(self) -> list[str | None]:
        return [one.WhichOneof("message") for one in self.said]

    def credits(self) -> list[tuple[int, int, int]]:
        found = [one.credit for one in self.said if one.HasField("credit")]
        return [(one.num_slots, one.num_free_blocks, one.num_leases_seen) for one in found]

    def lease(self, request_id: str) -> None:
        self.answers.put_nowait(pb.WorkResponse(lease=pb.Lease(request_id=request_id, epoch=1)))


class Router(rpc.WorkServiceServicer):
    """Welcomes whoever comes, unless told not to."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.welcoming = True
        self.reads = True
        self.streams: list[Stream] = []

    async def Work(
        self, request_iterator: AsyncIterator[pb.WorkRequest], context: Any
    ) -> AsyncIterator[pb.WorkResponse]:
        stream = Stream()
        self.streams.append(stream)
        if not self.welcoming:
            await asyncio.Event().wait()
        yield pb.WorkResponse(welcome=pb.RouterWelcome(router_id=self.router_id))
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(self._read(stream, request_iterator))
            while (answer := await stream.answers.get()) is not None:
                yield answer
            reader.cancel()

    async def _read(self, stream: Stream, requests: AsyncIterator[pb.WorkRequest]) -> None:
        if not self.reads:
            await asyncio.Event().wait()
        async for request in requests:
            stream.said.append(request)


class Handler:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.refusal: Exception | None = None

    def on_lease(self, router_id: str, lease: pb.Lease) -> None:
        self.heard.append(("lease", router_id, lease.request_id))
        if self.refusal is not None:
            raise self.refusal

    def on_cancel(self, router_id: str, request_id: str, epoch: int) -> None:
        self.heard.append(("cancel", router_id, request_id, epoch))

    def on_kv_grant(self, router_id: str, grant: pb.KvGrant) -> None:
        self.heard.append(("grant", router_id, grant.kv_lease_id, grant.reader_id))

    def on_router_lost(self, router_id: str) -> None:
        self.heard.append(("lost", router_id))


class Rig:
    """Routers on real sockets in one space of discovery, and one link."""

    def __init__(self) -> None:
        self.registry = MemoryRegistry(MemorySpace())
        self.handler = Handler()
        self.channels = ChannelPool()
        self.servers: dict[str, grpc.aio.Server] = {}

    async def serve(self, router: Router) -> None:
        server = grpc.aio.server()
        rpc.add_WorkServiceServicer_to_server(router, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self.servers[router.router_id] = server
        await self.registry.register(Instance("meshfire-router", router.router_id, f"127.0.0.1:{port}"))

    @asynccontextmanager
    async def linked(self, **options: Any) -> AsyncIterator[WorkerLink]:
        link = WorkerLink(HELLO, self.handler, self.registry, self.channels, **options)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(link.run())
            try:
                yield link
            finally:
                task.cancel()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    one = Rig()
    yield one
    await one.channels.close()
    for server in one.servers.values():
        await server.stop(None)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_hello_comes_first_and_credit_after_the_welcome(rig: Rig) -> None:
    router = Router("r")
    await rig.serve(router)
    async with rig.linked() as link:
        link.set_credit(3, 40)
        await until(lambda: router.streams and len(router.streams[0].said) == 2)
        assert link.connected.is_set()
        assert router.streams[0].said[0].hello == HELLO
        assert router.streams[0].credits() == [(3, 40, 0)]


async def test_credits_are_coalesced_counted_and_not_repeated(rig: Rig) -> None:
    router = Router("r")
    await rig.serve(router)
    async with rig.linked() as link:
        await until(lambda: router.streams and router.streams[0].credits() == [(0, 0, 0)])
        stream = router.streams[0]
        for slots in range(1, 50):
            link.set_credit(slots, 7)
        link.send("r", pb.WorkRequest(finished=pb.LeaseFinished(request_id="q")))
        await until(lambda: stream.credits()[-1] == (49, 7, 0))
        assert len(stream.credits()) <= 3, "only the newest counts"
        assert stream.kinds()[-2:] == ["finished", "credit"], "a credit does not overtake the end that made room"
        stream.lease("q")
        stream.lease("q2")
        await until(lambda: len(rig.handler.heard) == 2)
        link.set_credit(49, 7)
        await until(lambda: stream.credits()[-1] == (49, 7, 2))


async def test_the_routers_messages_reach_the_handler_in_order(rig: Rig) -> None:
    router = Router("r")
    await rig.serve(router)
    async with rig.linked() as link:
        await link.connected.wait()
        stream = router.streams[0]
        stream.lease("q")
        stream.answers.put_nowait(pb.WorkResponse(cancel=pb.LeaseCancel(request_id="q", epoch=4)))
        stream.answers.put_nowait(pb.WorkResponse(kv_grant=pb.KvGrant(kv_lease_id="kv", reader_id="d")))
        await until(lambda: len(rig.handler.heard) == 3)
        assert rig.handler.heard == [("lease", "r", "q"), ("cancel", "r", "q", 4), ("grant", "r", "kv", "d")]


async def test_a_lease_that_the_handler_refuses_is_answered_as_failed(rig: Rig) -> None:
    router = Router("r")
    await rig.serve(router)
    async with rig.linked() as link:
        await link.connected.wait()
        rig.handler.refusal = NoFreeBlocks("all in use", metadata={"num_blocks": "9"})
        router.streams[0].lease("q")
        await until(lambda: "failed" in router.streams[0].kinds())
        rig.handler.refusal = KeyError("a defect")
        router.streams[0].lease("q2")
        await until(lambda: router.streams[0].kinds().count("failed") == 2)
        refused, broken = (one.failed for one in router.streams[0].said if one.HasField("failed"))
        assert (refused.reason, refused.retryable, dict(refused.metadata)) == (
            "NO_FREE_BLOCKS",
            True,
            {"num_blocks": "9"},
        )
        assert (broken.reason, broken.retryable) == ("INTERNAL_ERROR", False)
        assert "defect" not in broken.message


async def test_a_lost_stream_is_told_and_a_new_one_begins_with_a_fresh_count(rig: Rig) -> None:
    router = Router("r")
    await rig.serve(router)
    async with rig.linked() as link:
        link.set_credit(2, 5)
        await link.connected.wait()
        router.streams[0].lease("q")
        await until(lambda: rig.handler.heard)
        router.streams[0].answers.put_nowait(None)
        await until(lambda: len(router.streams) == 2 and router.streams[1].credits())
        assert rig.handler.heard[-1] == ("lost", "r")
        assert router.streams[1].kinds()[0] == "hello"
        assert router.streams[1].credits() == [(2, 5, 0)]


async def test_every_router_has_its_own_stream_and_one_that_dies_takes_no_other_along(rig: Rig) -> None:
    routers = [Router("a"), Router("b")]
    for router in routers:
        await rig.serve(router)
    async with rig.linked() as link:
        await until(lambda: all(router.streams and router.streams[0].said for router in routers))
        await rig.registry.deregister("a")
        await rig.servers["a"].stop(None)
        await until(lambda: ("lost", "a") in rig.handler.heard)
        assert link.connected.is_set()
        link.send("a", pb.WorkRequest(finished=pb.LeaseFinished(request_id="nobody")))
        link.send("b", pb.WorkRequest(finished=pb.LeaseFinished(request_id="q")))
        await until(lambda: "finished" in routers[1].streams[0].kinds())
        await rig.servers["b"].stop(None)
        await until(lambda: not link.connected.is_set())


async def test_a_router_that_leaves_discovery_keeps_its_working_stream(rig: Rig) -> None:
    router = Router("r")
    await rig.serve(router)
    async with rig.linked() as link:
        await link.connected.wait()
        await rig.registry.deregister("r")
        await asyncio.sleep(0.05)
        router.streams[0].lease("q")
        await until(lambda: rig.handler.heard == [("lease", "r", "q")])
        assert len(router.streams) == 1


async def test_a_router_that_does_not_read_loses_its_stream_and_blocks_nobody(rig: Rig) -> None:
    router = Router("r")
    router.reads = False
    await rig.serve(router)
    async with rig.linked(max_queued_messages=8) as link:
        await link.connected.wait()
        router.reads = True  # for the stream after this one
        large = pb.WorkRequest(progress=pb.StepProgress(tokens=[pb.TokenProgress(request_id="x" * 1_000_000)]))
        for _ in range(100):
            link.send("r", large)  # never waits
            await asyncio.sleep(0)
        await until(lambda: ("lost", "r") in rig.handler.heard)
        await until(lambda: len(router.streams) == 2 and router.streams[1].said)


async def test_a_router_without_a_welcome_is_left(rig: Rig) -> None:
    router = Router("r")
    router.welcoming = False
    await rig.serve(router)
    async with rig.linked(welcome_timeout_s=0.05) as link:
        await until(lambda: len(router.streams) >= 2)
        assert not link.connected.is_set()
        assert rig.handler.heard == [], "a router that was never known is not lost"


async def test_the_outbox_says_when_it_is_full() -> None:
    outbox = Outbox(HELLO, max_messages=2)
    message = pb.WorkRequest(finished=pb.LeaseFinished())
    assert [outbox.post(message) for _ in range(3)] == [True, True, False]
