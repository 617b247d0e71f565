"""A whole decode worker with real (tiny) models: a router's stream on one side, a prefill worker's KV on the other.

Oracles: greedy tokens are those of `transformers` on the same files; sampled ones those of a plain loop over one
sequence, without batch, paging or wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
from torch import Tensor

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.prefill.v1 import prefill_service_pb2 as kv_pb
from meshfire.api.prefill.v1 import prefill_service_pb2_grpc as kv_rpc
from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.api.router.v1 import work_service_pb2_grpc as work_rpc
from meshfire.discovery.base import Instance
from meshfire.discovery.memory import MemoryRegistry
from meshfire.kv.hashing import chain_hashes
from meshfire.kv.store import KvStore
from meshfire.kv.transfer import Trailer, slice_block
from meshfire.model import registry as models
from meshfire.model.experts import LocalExperts
from meshfire.model.interface import ForwardBatch, SequenceSlice
from meshfire.model.sampling import SamplingParams, SamplingRow, sample
from meshfire.rpc import geometry, tensors
from meshfire.rpc.interceptors import ErrorsToStatus
from meshfire.runtime.serve import Mesh, running
from services.decode.config import DecodeSettings
from services.decode.server import build
from tests import oracles
from tests.unit.decode.fakes import FakeLink

P = 16


class PlainModel:
    """One sequence at a time, in one contiguous cache."""

    def __init__(self, directory: Path) -> None:
        self.facts = models.describe(directory)
        self.model = models.load(directory, block_tokens=P)
        self.experts = LocalExperts(models.open_experts(directory))

    @torch.no_grad()
    def run(self, store: KvStore, token_ids: Sequence[int], start: int) -> Tensor:
        """Hidden state of the last token: [H]; tokens before `start` are in the cache."""
        positions = torch.arange(start, len(token_ids))
        table = torch.arange(-(-len(token_ids) // P))
        whole = SequenceSlice(0, len(positions), len(token_ids), table)
        batch = ForwardBatch(torch.tensor(token_ids)[start:], positions, positions, (whole,))
        return self.model.forward(batch, store, self.experts)[-1]

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int, params: SamplingParams) -> list[int]:
        store = KvStore(self.model.geometry, -(-(len(prompt) + count) // P))
        tokens, start = list(prompt), 0
        while len(tokens) < len(prompt) + count:
            logits = self.model.logits(self.run(store, tokens, start)[None])
            start = len(tokens)
            row = SamplingRow(params, len(tokens), prompt, tokens[len(prompt) :])
            tokens.append(sample(logits, [row])[0].token_id)
        return tokens[len(prompt) :]


class KvOwner(kv_rpc.PrefillServiceServicer):
    """Plays the prefill worker: computes KV when it is read."""

    def __init__(self, plain: PlainModel) -> None:
        self._plain = plain
        self.tokens: dict[str, list[int]] = {}
        self.reads: dict[str, list[int]] = {}
        self.outcomes: dict[str, int] = {}
        self.corrupt: set[str] = set()

    async def ReadKv(self, request: kv_pb.ReadKvRequest, context: Any) -> AsyncIterator[kv_pb.ReadKvResponse]:
        plain, token_ids = self._plain, self.tokens[request.kv_lease_id]
        self.reads[request.kv_lease_id] = list(request.wanted_blocks)
        store = KvStore(plain.model.geometry, -(-len(token_ids) // P))
        hidden = plain.run(store, token_ids, 0)
        header = kv_pb.KvHeader(
            kv_lease_id=request.kv_lease_id,
            epoch=request.epoch,
            model_revision=plain.facts.revision,
            geometry=geometry.to_wire(store.geometry),
            num_tokens=len(token_ids),
            block_hashes=chain_hashes(token_ids, P, model_revision=plain.facts.revision),
            last_hidden=tensors.encode(hidden),
        )
        yield kv_pb.ReadKvResponse(header=header)
        sent = Trailer()
        for index in request.wanted_blocks:
            for frame in slice_block(index, store.export_block(index), store.geometry):
                sent = sent.plus(frame)
                block = kv_pb.KvBlock(**vars(frame))
                if request.kv_lease_id in self.corrupt:
                    block.data = bytes([block.data[0] ^ 1]) + block.data[1:]
                yield kv_pb.ReadKvResponse(block=block)
        yield kv_pb.ReadKvResponse(trailer=kv_pb.KvTrailer(num_frames=sent.num_frames, num_bytes=sent.num_bytes))

    async def ReleaseKv(self, request: kv_pb.ReleaseKvRequest, context: Any) -> kv_pb.ReleaseKvResponse:
        self.outcomes[request.kv_lease_id] = request.outcome
        return kv_pb.ReleaseKvResponse()


class FakeRouter(work_rpc.WorkServiceServicer):
    """Sends what tests put into `orders`; what the worker says goes to `heard`."""

    def __init__(self) -> None:
        self.orders: asyncio.Queue[pb.WorkResponse] = asyncio.Queue(16)
        self.heard = FakeLink()
        self.hello = pb.WorkerHello()

    async def Work(self, requests: Any, context: Any) -> AsyncIterator[pb.WorkResponse]:
        yield pb.WorkResponse(welcome=pb.RouterWelcome(router_id="router-1"))
        async with asyncio.TaskGroup() as tasks:
            listener = tasks.create_task(self._listen(requests))
            try:
                while True:
                    yield await self.orders.get()
            finally:
                listener.cancel()

    async def _listen(self, requests: Any) -> None:
        async for request in requests:
            if request.HasField("hello"):
                self.hello = request.hello
            if request.HasField("credit"):
                self.heard.set_credit(request.credit.num_slots, request.credit.num_free_blocks)
            else:
                self.heard.send("router-1", request)


@dataclass
class Stage:
    router: FakeRouter
    owner: KvOwner
    mesh: Mesh
    address: str
    count: int = field(default=0)

    async def lease(self, request_id: str, token_ids: list[int], *, max_tokens: int, **sampling: Any) -> None:
        kv_lease_id = f"kv-{request_id}"
        self.owner.tokens[kv_lease_id] = token_ids
        params = {"temperature": 0.0, "seed": 5, "ignore_eos": True} | sampling
        decode = pb.DecodeWork(
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            kv_lease_id=kv_lease_id,
            kv_address=self.address,
            sampling=sampling_pb2.SamplingParams(max_tokens=max_tokens, **params),
        )
        lease = pb.Lease(request_id=request_id, epoch=1, remaining_ms=50_000, decode=decode)
        await self.router.orders.put(pb.WorkResponse(lease=lease))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["llama", "deepseek"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: Callable[[Path], Path] = getattr(oracles, f"make_{request.param}_checkpoint")
    return make(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> PlainModel:
    return PlainModel(model_dir)


@asynccontextmanager
async def grpc_server(*add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[ErrorsToStatus()])
    for one in add:
        one(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.fixture
async def stage(model_dir: Path, plain: PlainModel) -> AsyncIterator[Stage]:
    router, owner, registry = FakeRouter(), KvOwner(plain), MemoryRegistry()
    settings = DecodeSettings(
        instance_id="decode-0",
        registry_url="memory:",
        model="tiny",
        model_dir=model_dir,
        experts="local",
        num_kv_blocks=64,
        max_batch=4,
        max_waiting=8,
        block_tokens=P,
        discovery_lag_s=0,
    )
    async with grpc_server(
        lambda server: work_rpc.add_WorkServiceServicer_to_server(router, server),
        lambda server: kv_rpc.add_PrefillServiceServicer_to_server(owner, server),
    ) as address:
        await registry.register(Instance("meshfire-router", "router-0", address, {}))
        async with running("decode", build, settings, registry=registry) as mesh:
            await router.heard.until(lambda: router.heard.credit == (12, 64))
            yield Stage(router, owner, mesh, address)
        await registry.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(5, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


async def test_greedy_tokens_of_a_changing_batch_are_the_oracle_s(stage: Stage, model_dir: Path) -> None:
    heard = stage.router.heard
    prompts = {f"r{n}": prompt_of(length, n) for n, length in enumerate([1, 15, 16, 17, 33, 40])}
    lengths = {"r0": 20, "r1": 3, "r2": 18, "r3": 9, "r4": 16, "r5": 12}
    for name, prompt in prompts.items():
        await stage.lease(name, prompt, max_tokens=lengths[name])
    oracle = oracles.load_oracle(model_dir)
    for name, prompt in prompts.items():
        await heard.finished(name)
        assert heard.tokens(name) == oracles.oracle_greedy(oracle, prompt, lengths[name])[0]
    await heard.until(lambda: heard.credit == (12, 64))


async def test_sampled_tokens_do_not_depend_on_batch_or_on_what_was_held(stage: Stage, plain: PlainModel) -> None:
    heard, prompt = stage.router.heard, prompt_of(48)
    params = {"temperature": 1.2, "top_p": 0.875, "top_k": 200, "seed": 77}
    expected = plain.generate(prompt, 16, SamplingParams(**params))
    await stage.lease("cold", prompt, max_tokens=16, **params)
    await heard.finished("cold")
    part = [*prompt[:32], *prompt_of(10, 9)]
    await stage.lease("full", prompt, max_tokens=16, **params)
    await stage.lease("part", part, max_tokens=16, **params)
    await stage.lease("neighbour", prompt_of(20, 3), max_tokens=16)
    for name in ("full", "part", "neighbour"):
        await heard.finished(name)
    assert stage.owner.reads["kv-cold"] == [0, 1, 2]
    assert stage.owner.reads["kv-full"] == []
    assert stage.owner.reads["kv-part"] == [2]
    assert heard.tokens("cold") == heard.tokens("full") == expected
    assert heard.tokens("part") == plain.generate(part, 16, SamplingParams(**params))


async def test_corrupt_kv_fails_the_lease_by_name_and_frees_its_blocks(stage: Stage) -> None:
    heard = stage.router.heard
    stage.owner.corrupt.add("kv-bad")
    await stage.lease("bad", prompt_of(20), max_tokens=4)
    failed = await heard.failed("bad")
    assert (failed.reason, failed.retryable) == ("KV_CORRUPT", True)
    await heard.until(lambda: heard.credit == (12, 64))
    async with asyncio.timeout(20):
        while "kv-bad" not in stage.owner.outcomes:
            await asyncio.sleep(0.005)
    assert stage.owner.outcomes["kv-bad"] == kv_pb.KV_OUTCOME_ABANDONED
    await stage.lease("good", prompt_of(20), max_tokens=4)
    await heard.finished("good")
    assert stage.owner.reads["kv-good"] == [0, 1], "a block that did not verify was published"


async def test_the_worker_introduces_itself(stage: Stage, plain: PlainModel) -> None:
    hello = stage.router.hello
    assert (hello.role, hello.model, hello.address) == (pb.WORKER_ROLE_DECODE, "tiny", stage.mesh.address)
    assert hello.worker_id.startswith("decode-0.")
    assert hello.context_tokens == min(plain.facts.context_tokens, 64 * P)
    assert geometry.from_wire(hello.geometry) == plain.model.geometry
    assert list(hello.end_token_ids) == list(plain.facts.end_token_ids)


async def test_a_process_that_ends_with_work_under_way_leaves_no_task(model_dir: Path, plain: PlainModel) -> None:
    router, owner, registry = FakeRouter(), KvOwner(plain), MemoryRegistry()
    settings = DecodeSettings(
        registry_url="memory:", model="tiny", model_dir=model_dir, experts="local", discovery_lag_s=0, drain_s=0.05
    )
    async with grpc_server(
        lambda server: work_rpc.add_WorkServiceServicer_to_server(router, server),
        lambda server: kv_rpc.add_PrefillServiceServicer_to_server(owner, server),
    ) as address:
        await registry.register(Instance("meshfire-router", "router-0", address, {}))
        async with running("decode", build, settings, registry=registry) as mesh:
            await router.heard.until(lambda: router.heard.credit[0] > 0)
            await Stage(router, owner, mesh, address).lease("a", prompt_of(20), max_tokens=400)
            await router.heard.until(lambda: len(router.heard.progress("a")) > 3)
        assert router.heard.ends("a") == [], "the stream's end says it: the router goes on elsewhere"
        await registry.close()
    assert {task for task in asyncio.all_tasks() if task is not asyncio.current_task()} == set()
