"""A whole prefill worker with a real (tiny) model: a router's stream on one side, a reader's on the other.

The oracle is `transformers` on the same files.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc.aio
import pytest
import torch

from meshfire.api.prefill.v1 import prefill_service_pb2 as pb
from meshfire.api.prefill.v1.prefill_service_pb2_grpc import PrefillServiceStub
from meshfire.api.router.v1 import work_service_pb2 as work_pb
from meshfire.api.router.v1 import work_service_pb2_grpc as work_rpc
from meshfire.discovery.base import Instance
from meshfire.discovery.memory import MemoryRegistry
from meshfire.rpc import tensors
from meshfire.rpc.channels import ChannelPool
from meshfire.runtime.serve import Mesh, running
from services.prefill.config import PrefillSettings
from services.prefill.server import build
from tests import oracles
from tests.unit.prefill.fakes import lease_of

PROMPT = [(7 * index) % 300 + 3 for index in range(45)]


class FakeRouter(work_rpc.WorkServiceServicer):
    """Says what tests put into `orders` and keeps what the worker says."""

    def __init__(self) -> None:
        self.orders: asyncio.Queue[work_pb.WorkResponse] = asyncio.Queue(16)
        self.said: asyncio.Queue[work_pb.WorkRequest] = asyncio.Queue(256)

    async def Work(self, requests, context):  # type: ignore[no-untyped-def]
        yield work_pb.WorkResponse(welcome=work_pb.RouterWelcome(router_id="router-1"))
        async with asyncio.TaskGroup() as tasks:
            listener = tasks.create_task(self._listen(requests))
            try:
                while True:
                    yield await self.orders.get()
            finally:
                listener.cancel()

    async def _listen(self, requests: AsyncIterator[work_pb.WorkRequest]) -> None:
        async for request in requests:
            await self.said.put(request)

    async def hear(self, kind: str) -> work_pb.WorkRequest:
        """The worker's next message of one kind."""
        async with asyncio.timeout(20):
            while (message := await self.said.get()).WhichOneof("message") != kind:
                pass
            return message


class Stage:
    """One worker between a fake router and a reader."""

    def __init__(self, router: FakeRouter, mesh: Mesh, hello: work_pb.WorkerHello, channels: ChannelPool) -> None:
        self.router, self.mesh, self.hello = router, mesh, hello
        self._stub = PrefillServiceStub(channels.get(mesh.address))

    async def prefill(self, token_ids: list[int], request_id: str) -> work_pb.KvOffer:
        await self.router.orders.put(work_pb.WorkResponse(lease=lease_of(token_ids, request_id=request_id)))
        return (await self.router.hear("kv_offer")).kv_offer

    async def read(self, offer: work_pb.KvOffer) -> tuple[torch.Tensor, dict[int, bytes]]:
        """Last hidden state, and the bytes of every block."""
        grant = work_pb.KvGrant(kv_lease_id=offer.kv_lease_id, epoch=1, reader_id="decode-1")
        await self.router.orders.put(work_pb.WorkResponse(kv_grant=grant))
        num_blocks = -(-offer.num_tokens // self.hello.geometry.block_tokens)
        request = pb.ReadKvRequest(
            kv_lease_id=offer.kv_lease_id,
            epoch=1,
            reader_id="decode-1",
            wanted_blocks=range(num_blocks),
            geometry=self.hello.geometry,
            model_revision=self.hello.model_revision,
        )
        blocks: dict[int, bytes] = {}
        hidden = torch.empty(0)
        async for response in self._stub.ReadKv(request, timeout=20):
            if response.HasField("header"):
                hidden = tensors.decode(response.header.last_hidden, field="last_hidden")
            elif response.HasField("block"):
                blocks[response.block.block_index] = blocks.get(response.block.block_index, b"") + response.block.data
        release = pb.ReleaseKvRequest(
            kv_lease_id=offer.kv_lease_id, epoch=1, reader_id="decode-1", outcome=pb.KV_OUTCOME_ACKNOWLEDGED
        )
        await self._stub.ReleaseKv(release, timeout=20)
        return hidden, blocks


@pytest.fixture(scope="module", params=["llama", "deepseek"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: Callable[[Path], Path] = getattr(oracles, f"make_{request.param}_checkpoint")
    return make(tmp_path_factory.mktemp(request.param))


@pytest.fixture
async def stage(model_dir: Path) -> AsyncIterator[Stage]:
    router, registry, channels = FakeRouter(), MemoryRegistry(), ChannelPool()
    server = grpc.aio.server()
    work_rpc.add_WorkServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await registry.register(Instance("meshfire-router", "router-0", f"127.0.0.1:{port}", {}))
    settings = PrefillSettings(
        instance_id="prefill-0",
        registry_url="memory:",
        model="tiny",
        model_dir=model_dir,
        experts="local",
        num_kv_blocks=32,
        chunk_tokens=16,
        discovery_lag_s=0,
    )
    try:
        async with running("prefill", build, settings, registry=registry) as mesh:
            hello = (await router.hear("hello")).hello
            yield Stage(router, mesh, hello, channels)
    finally:
        await channels.close()
        await server.stop(None)
        await registry.close()


async def test_the_last_hidden_state_is_the_oracles_and_a_cached_prefix_changes_no_bit(
    stage: Stage, model_dir: Path
) -> None:
    cold = await stage.prefill(PROMPT, "cold")
    hidden, blocks = await stage.read(cold)
    with torch.no_grad():
        oracle = oracles.load_oracle(model_dir).model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
    torch.testing.assert_close(hidden, oracle, rtol=1e-4, atol=1e-4)
    warm = await stage.prefill(PROMPT, "warm")
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32)
    warm_hidden, warm_blocks = await stage.read(warm)
    assert torch.equal(warm_hidden, hidden)
    assert warm_blocks == blocks
    assert sorted(blocks) == [0, 1, 2]


async def test_the_worker_introduces_itself_and_gives_back_all_credit(stage: Stage) -> None:
    hello = stage.hello
    assert (hello.role, hello.model, hello.address) == (work_pb.WORKER_ROLE_PREFILL, "tiny", stage.mesh.address)
    assert hello.worker_id.startswith("prefill-0.")
    assert hello.context_tokens == min(32 * 16, 512)
    (instance,) = await anext(aiter(stage.mesh.registry.watch("meshfire-prefill")))
    assert instance.metadata["worker_id"] == hello.worker_id
    assert instance.metadata["model_revision"] == hello.model_revision
    await stage.read(await stage.prefill(PROMPT, "r1"))
    async with asyncio.timeout(20):
        while (credit := (await stage.router.hear("credit")).credit).num_free_blocks != 32:
            pass
    assert (credit.num_slots, credit.num_leases_seen) == (4, 1)
