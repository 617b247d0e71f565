"""Expert shards of a tiny model on loopback servers in this process, and a caller with a model thread of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch import Tensor

from meshfire.api.expert_shard.v1 import expert_shard_service_pb2 as pb
from meshfire.api.expert_shard.v1 import expert_shard_service_pb2_grpc as rpc
from meshfire.discovery.memory import MemoryRegistry, MemorySpace
from meshfire.model.compute.fp32 import Fp32Compute
from meshfire.model.compute.interface import Ffn
from meshfire.model.interface import ExpertLayout
from meshfire.model.stored import StoredFfn
from meshfire.placement.shard_map import ShardMap, placement_key
from meshfire.rpc.channels import ChannelPool
from meshfire.runtime.model_thread import ModelThread
from meshfire.runtime.serve import Mesh, Service, running
from meshfire.telemetry.setup import configure
from meshfire.worker import hop_lane
from meshfire.worker.experts import ExpertMesh, ExpertSession
from services.expert_shard.config import ExpertShardSettings
from services.expert_shard.core import ExpertStore
from services.expert_shard.server import serving

HIDDEN, INNER = 24, 40
LAYOUT = ExpertLayout(num_experts=(0, 6, 6), hidden_size=HIDDEN)
MODEL, REVISION = "tiny", "r1"


def plain_weights(layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """gate [I, H], up [I, H], down [H, I] of one expert, the same in every process and test."""
    seeded = torch.Generator().manual_seed(1000 * layer + expert)
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    first, second, third = (torch.randn(shape, generator=seeded) / 5 for shape in shapes)
    return first, second, third


@dataclass
class TinySource:
    """Weights from a generator; remembers what was read."""

    read: list[tuple[int, int]] = field(default_factory=list)

    def load(self, layer: int, expert: int) -> Ffn:
        self.read.append((layer, expert))
        return Fp32Compute().ffn(StoredFfn.of(*plain_weights(layer, expert)))


def plain_sum(layer: int, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """The oracle: one choice at a time, in float64, straight from the formula."""
    total = torch.zeros(hidden.shape, dtype=torch.float64)
    for row, (ids, weights) in enumerate(zip(topk_ids.tolist(), topk_weights.double())):
        for expert, weight in zip(ids, weights):
            if expert >= 0:
                gate, up, down = (one.double() for one in plain_weights(layer, expert))
                x = hidden[row].double()
                total[row] += weight * (down @ (torch.nn.functional.silu(gate @ x) * (up @ x)))
    return total


def step_of(num_tokens: int, top_k: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, topk_ids, topk_weights of a random step; ids of a row are distinct."""
    seeded = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, HIDDEN, generator=seeded)
    ids = torch.stack([torch.randperm(6, generator=seeded)[:top_k] for _ in range(num_tokens)]).int()
    return hidden, ids, torch.rand(num_tokens, top_k, generator=seeded)


class Wire:
    """Relays in front of one shard, for its stream and its lanes, that can be cut or frozen as its process would be."""

    def __init__(self, target: str, lane_target: str) -> None:
        self._target = target
        self._lane_target = lane_target
        #: name of the local socket that leads to the shard through this wire
        self.lane_name = f"wire-{lane_target}"
        self._open = asyncio.Event()
        self._open.set()
        self._streams_open = asyncio.Event()
        self._streams_open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._servers: list[asyncio.Server] = []
        self.num_bytes = 0

    async def start(self) -> str:
        """Listen; the address to reach the shard through this wire."""
        self._servers.append(await asyncio.start_server(self._relay, "127.0.0.1", 0))
        self._servers.append(await asyncio.start_unix_server(self._relay_lane, "\0meshfire-hop-" + self.lane_name))
        return f"127.0.0.1:{self._servers[0].sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Reset every connection; new ones are taken again at once."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    def freeze(self) -> None:
        """Connections stay up and carry nothing."""
        self._open.clear()

    def freeze_streams(self) -> None:
        """Only lanes carry something."""
        self._streams_open.clear()

    def thaw(self) -> None:
        self._open.set()
        self._streams_open.set()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        self.thaw()
        self.cut()
        for server in self._servers:
            await server.wait_closed()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        await self._join(reader, writer, asyncio.open_connection(host, int(port)), self._streams_open)

    async def _relay_lane(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = asyncio.open_unix_connection("\0meshfire-hop-" + self._lane_target)
        await self._join(reader, writer, far, self._open)

    async def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connecting: Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
        may_pass: asyncio.Event,
    ) -> None:
        try:
            far_reader, far_writer = await connecting
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, far_writer, may_pass))
                group.create_task(self._copy(far_reader, writer, may_pass))
        except* OSError:
            writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may_pass: asyncio.Event) -> None:
        self._writers.add(writer)
        try:
            while chunk := await reader.read(65536):
                await self._open.wait()
                await may_pass.wait()
                self.num_bytes += len(chunk)
                writer.write(chunk)
                await writer.drain()
            raise ConnectionResetError
        finally:
            self._writers.discard(writer)
            writer.transport.abort()


@dataclass
class Cluster:
    """A discovery space and the shards in it."""

    space: MemorySpace
    spans: InMemorySpanExporter
    stack: AsyncExitStack
    #: how callers reach its shards
    transport: str = "auto"
    #: local socket of a shard → the one of the wire before it
    lane_wires: dict[str, str] = field(default_factory=dict)
    _lives: dict[str, AsyncExitStack] = field(default_factory=dict)

    async def put_document(self, document: bytes) -> None:
        await MemoryRegistry(self.space).kv_put(placement_key(MODEL), document)

    async def place(self, shard_map: ShardMap) -> None:
        await self.put_document(shard_map.to_json())

    async def start(
        self,
        shard_id: str,
        *,
        port: int = 0,
        source: TinySource | None = None,
        revision: str = REVISION,
        **settings: object,
    ) -> Mesh:
        """One shard as its process would run it; up when this returns."""
        made = ExpertShardSettings(
            model=MODEL,
            model_dir="unused",
            shard_id=shard_id,
            instance_id=shard_id,
            port=port,
            discovery_lag_s=0,
            drain_s=2,
            **settings,
        )

        @asynccontextmanager
        async def build(settings: ExpertShardSettings, mesh: Mesh) -> AsyncIterator[Service]:
            store = ExpertStore(source or TinySource(), LAYOUT)
            async with serving(settings, mesh, store, revision) as service:
                yield service

        life = AsyncExitStack()
        self.stack.push_async_callback(life.aclose)
        telemetry = configure("expert_shard", shard_id, exporter=self.spans)
        registry = MemoryRegistry(self.space)
        mesh = await life.enter_async_context(
            running("expert_shard", build, made, registry=registry, telemetry=telemetry)
        )
        self._lives[shard_id] = life
        return mesh

    async def wire(self, mesh: Mesh) -> Wire:
        """Put a wire before a shard that runs: discovery names the wire's address from now on."""
        channels = ChannelPool()
        stub = rpc.ExpertShardServiceStub(channels.get(mesh.address))
        local_socket = (await stub.DescribeShard(pb.DescribeShardRequest())).local_socket
        await channels.close()
        wire = Wire(mesh.address, local_socket)
        self.lane_wires[local_socket] = wire.lane_name
        address = await wire.start()
        self.stack.push_async_callback(wire.close)
        [real] = [one for one in self.space.instances_of("meshfire-expert-shard") if one.address == mesh.address]
        self.space.put_instance(dataclasses.replace(real, address=address))
        return wire

    async def stop(self, shard_id: str) -> None:
        """Drain and end one shard."""
        await self._lives.pop(shard_id).aclose()


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    torch.set_num_threads(1)
    async with AsyncExitStack() as stack:
        made = Cluster(MemorySpace(), InMemorySpanExporter(), stack)
        connect = hop_lane.connect
        monkeypatch.setattr(hop_lane, "connect", lambda name: connect(made.lane_wires.get(name, name)))
        yield made


@dataclass
class Caller:
    """A worker's side: an expert mesh and the thread that its model would run on."""

    experts: ExpertMesh
    thread: ModelThread

    def session(self, *, timeout_s: float = 20.0, traceparents: Sequence[str] = ()) -> ExpertSession:
        return self.experts.session(deadline=time.monotonic() + timeout_s, traceparents=traceparents)

    async def forward(
        self, layer: int, step: tuple[Tensor, Tensor, Tensor], session: ExpertSession | None = None
    ) -> Tensor:
        asked = session or self.session()
        return await self.thread.run(lambda: asked.dispatch(layer, *step).result())


@asynccontextmanager
async def calling(cluster: Cluster, *, model_revision: str = REVISION, **options: object) -> AsyncIterator[Caller]:
    """A caller that is not ready yet."""
    channels = ChannelPool()
    registry = MemoryRegistry(cluster.space)
    try:
        with ModelThread("caller-model") as thread:
            options = {"transport": cluster.transport, **options}
            opened = ExpertMesh.open(MODEL, model_revision, LAYOUT, registry, channels, "decode-0", **options)
            async with opened as experts:
                yield Caller(experts, thread)
    finally:
        await registry.close()
        await channels.close()


def port_of(mesh: Mesh) -> int:
    return int(mesh.address.rpartition(":")[2])


def by_shard(experts: Mapping[str, Sequence[int]], *, epoch: int = 1) -> ShardMap:
    """A placement from shard id → experts, the same in both layers; an expert named by several has replicas."""
    layer = tuple(tuple(shard for shard, held in experts.items() if expert in held) for expert in range(6))
    return ShardMap(epoch, MODEL, REVISION, ((), layer, layer))
