"""Stand-ins for everything around a router: workers that speak the real WorkService, a tokenizer of bytes.

Tokens are bytes (0 to 255) and END. What a model would say is a pure function of the position, so that the right
output of any request is known without asking anybody.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from meshfire.api.common.v1 import kv_pb2, sampling_pb2, tensor_pb2
from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as tok
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2_grpc as tok_rpc
from meshfire.discovery.base import Instance
from meshfire.discovery.memory import MemoryRegistry, MemorySpace
from meshfire.errors import BadInput, MeshfireError
from meshfire.rpc.channels import ChannelPool
from meshfire.rpc.interceptors import ErrorsToStatus
from meshfire.runtime.serve import Mesh, running
from meshfire.telemetry.setup import configure
from meshfire.worker.link import WorkerLink
from services.router.config import RouterSettings
from services.router.server import build

END = 256
VOCABULARY = 257
CONTEXT = 512
STORY = b"The quick brown fox jumps over the lazy dog. "


def token_at(index: int) -> int:
    """What the model says at an index of its output."""
    return STORY[index % len(STORY)]


def story(num_tokens: int) -> str:
    """The first tokens of every output, as text."""
    return bytes(token_at(index) for index in range(num_tokens)).decode()


@dataclass
class FakeWorker:
    """A worker of either role. `gate` is passed before each offer and each token: tests hold or break things there."""

    registry: MemoryRegistry
    role: pb.WorkerRole.ValueType
    worker_id: str
    model: str = "tiny"
    revision: str = "r1"
    num_slots: int = 4
    num_blocks: int = 1000
    #: Output of every request, END excluded; None = endless.
    num_output: int | None = None
    gate: Callable[[FakeWorker, pb.Lease, int], Any] | None = None
    leases: list[pb.Lease] = field(default_factory=list)
    cancels: list[tuple[str, int]] = field(default_factory=list)
    grants: list[pb.KvGrant] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    expires_ms: int = 20_000
    logprobs: bool = False

    def __post_init__(self) -> None:
        hello = pb.WorkerHello(
            worker_id=self.worker_id,
            role=self.role,
            model=self.model,
            model_revision=self.revision,
            geometry=kv_pb2.KvGeometry(num_layers=2, block_tokens=16, row_width=8, dtype=tensor_pb2.DATA_TYPE_FLOAT32),
            address=f"{self.worker_id}.test:1",
            context_tokens=CONTEXT,
            vocab_size=VOCABULARY,
            end_token_ids=[END],
        )
        self.channels = ChannelPool()
        self.link = WorkerLink(hello, self, self.registry, self.channels)
        self.running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    # --- LeaseHandler

    def on_lease(self, router_id: str, lease: pb.Lease) -> None:
        self.leases.append(lease)
        assert self._group is not None
        work = self._prefill if lease.HasField("prefill") else self._decode
        task = self._group.create_task(self._guarded(router_id, lease, work), name=f"lease {lease.request_id}")
        self.running[lease.request_id, lease.epoch] = task
        task.add_done_callback(lambda _: self._freed((lease.request_id, lease.epoch)))
        self.say_credit()

    def on_cancel(self, router_id: str, request_id: str, epoch: int) -> None:
        self.cancels.append((request_id, epoch))
        for (held_id, held_epoch), task in self.running.items():
            if held_id == request_id and held_epoch <= epoch:
                task.cancel()

    def on_kv_grant(self, router_id: str, grant: pb.KvGrant) -> None:
        self.grants.append(grant)

    def on_router_lost(self, router_id: str) -> None:
        self.lost.append(router_id)
        for task in self.running.values():
            task.cancel()

    # --- life

    @asynccontextmanager
    async def up(self) -> AsyncIterator[FakeWorker]:
        async with asyncio.TaskGroup() as group:
            self._group = group
            runner = group.create_task(self.link.run())
            self.say_credit()
            try:
                async with asyncio.timeout(10):
                    await self.link.connected.wait()
                yield self
            finally:
                self._group = None
                runner.cancel()
                for task in list(self.running.values()):
                    task.cancel()
        await self.channels.close()

    async def kill(self) -> None:
        """Go away as a killed process does: the connection breaks, nothing is said."""
        await self.channels.close()

    def say_credit(self) -> None:
        self.link.set_credit(self.num_slots - len(self.running), self.num_blocks)

    def _freed(self, key: tuple[str, int]) -> None:
        del self.running[key]
        self.say_credit()

    # --- work

    async def _guarded(self, router_id: str, lease: pb.Lease, work: Callable[..., Any]) -> None:
        try:
            await work(router_id, lease)
        except MeshfireError as error:
            self.say_failed(router_id, lease, error)

    def say_failed(self, router_id: str, lease: pb.Lease, error: MeshfireError) -> None:
        failed = pb.LeaseFailed(
            request_id=lease.request_id,
            epoch=lease.epoch,
            reason=error.reason,
            message=error.message,
            retryable=error.retryable,
            metadata=error.metadata,
        )
        self.link.send(router_id, pb.WorkRequest(failed=failed))

    async def _pass(self, lease: pb.Lease, index: int) -> None:
        if self.gate is not None:
            result = self.gate(self, lease, index)
            if result is not None:
                await result

    async def _prefill(self, router_id: str, lease: pb.Lease) -> None:
        await self._pass(lease, 0)
        num_tokens = len(lease.prefill.token_ids)
        offer = pb.KvOffer(
            request_id=lease.request_id,
            epoch=lease.epoch,
            kv_lease_id=f"kv-{lease.request_id}-{lease.epoch}",
            num_tokens=num_tokens,
            num_cached_tokens=num_tokens // 2,
            num_bytes=num_tokens * 64,
            expires_ms=self.expires_ms,
        )
        self.link.send(router_id, pb.WorkRequest(kv_offer=offer))

    async def _decode(self, router_id: str, lease: pb.Lease) -> None:
        work = lease.decode
        first = len(work.token_ids) - work.num_prompt_tokens
        for index in itertools.count(first):
            if index >= work.sampling.max_tokens:
                return self._say_finished(router_id, lease, sampling_pb2.FINISH_REASON_LENGTH)
            await self._pass(lease, index)
            token_id = self._choose(work, index)
            if token_id == END:
                return self._say_finished(router_id, lease, sampling_pb2.FINISH_REASON_STOP, END)
            self.say_token(router_id, lease, index, token_id)
            await asyncio.sleep(0)
        return None

    def _choose(self, work: pb.DecodeWork, index: int) -> int:
        if work.scripted:
            return work.script_token_ids[index] if index < len(work.script_token_ids) else END
        return END if index == self.num_output else token_at(index)

    def say_token(self, router_id: str, lease: pb.Lease, index: int, token_id: int) -> None:
        progress = pb.TokenProgress(
            request_id=lease.request_id, epoch=lease.epoch, first_index=index, token_ids=[token_id]
        )
        if self.logprobs:
            progress.logprobs.add(logprob=-0.5, top_ids=[token_id, 65], top_logprobs=[-0.5, -1.5])
        self.link.send(router_id, pb.WorkRequest(progress=pb.StepProgress(tokens=[progress])))

    def _say_finished(
        self,
        router_id: str,
        lease: pb.Lease,
        reason: sampling_pb2.FinishReason.ValueType,
        stop_token_id: int | None = None,
    ) -> None:
        finished = pb.LeaseFinished(
            request_id=lease.request_id,
            epoch=lease.epoch,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            kv_bytes=777,
        )
        self.link.send(router_id, pb.WorkRequest(finished=finished))


class FakeTokenizer(tok_rpc.TokenizerServiceServicer):
    """Bytes are tokens; END has no text. `break_after` messages of a stream it dies, once."""

    def __init__(self) -> None:
        self.break_after: int | None = None
        self.num_streams = 0
        self.parents: list[str] = []

    async def Tokenize(self, request: tok.TokenizeRequest, context: Any) -> tok.TokenizeResponse:
        self.parents.append(dict(context.invocation_metadata()).get("traceparent", ""))
        if request.WhichOneof("input") == "text":
            return tok.TokenizeResponse(token_ids=list(request.text.encode()))
        text = "".join(f"<{one.role}>{one.content}" for one in request.chat.messages)
        return tok.TokenizeResponse(token_ids=list(text.encode()))

    async def Detokenize(
        self, request_iterator: AsyncIterator[tok.DetokenizeRequest], context: Any
    ) -> AsyncIterator[tok.DetokenizeResponse]:
        self.num_streams += 1
        start: tok.DetokenizeStart | None = None
        waiting = b""
        async for number, request in _numbered(request_iterator):
            if start is None:
                start = request.start
                continue
            if self.break_after is not None and number > self.break_after:
                self.break_after = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "broken on purpose")
            response, waiting = _detokenize(start, waiting, request.tokens)
            yield response

    async def Describe(self, request: tok.DescribeRequest, context: Any) -> tok.DescribeResponse:
        return tok.DescribeResponse()

    async def TokenizeScript(self, request: tok.TokenizeScriptRequest, context: Any) -> tok.TokenizeScriptResponse:
        script = json.loads(request.script_json)
        if "pieces" not in script:
            raise BadInput("a script needs pieces", field="pieces")
        ids = list("".join(script["pieces"]).encode())
        return tok.TokenizeScriptResponse(token_ids=ids, ends_with_eos=script.get("end") == "eos")


def _detokenize(
    start: tok.DetokenizeStart, waiting: bytes, tokens: tok.DetokenizeTokens
) -> tuple[tok.DetokenizeResponse, bytes]:
    """Holds back what may begin a stop text; every token is one byte of ASCII."""
    response = tok.DetokenizeResponse(num_tokens_used=len(tokens.token_ids))
    response.pieces.extend(bytes([one]) if one < 256 else b"" for one in tokens.lookup_ids)
    for index, token_id in enumerate(tokens.token_ids):
        waiting += bytes([token_id]) if token_id < 256 else b""
        hit = next((stop for stop in start.stop if waiting.endswith(stop.encode())), None)
        if hit is not None:
            response.text += waiting[: -len(hit)].decode()
            response.stop_hit = hit
            response.num_tokens_used = index + 1
            return response, b""
    longest = 0 if tokens.last else max((len(stop) - 1 for stop in start.stop), default=0)
    cut = max(0, len(waiting) - longest)
    response.text += waiting[:cut].decode()
    return response, waiting[cut:]


async def _numbered(stream: AsyncIterator[Any]) -> AsyncIterator[tuple[int, Any]]:
    number = 0
    async for message in stream:
        yield number, message
        number += 1


@dataclass
class TokenizerProcess:
    """A fake tokenizer behind a real socket."""

    servicer: FakeTokenizer
    server: grpc.aio.Server
    registry: MemoryRegistry
    instance_id: str

    async def kill(self) -> None:
        """Break every stream and leave discovery."""
        await self.registry.deregister(self.instance_id)
        await self.server.stop(None)


class TestMesh:
    """A router, or several, and whatever a test puts around it; all in one space of discovery."""

    __test__ = False

    def __init__(self, space: MemorySpace, exporter: Any = None) -> None:
        self.space = space
        self.registry = MemoryRegistry(space)
        self._exporter = exporter

    @asynccontextmanager
    async def router(self, instance_id: str = "router-0", **settings: Any) -> AsyncIterator[Mesh]:
        chosen = {"discovery_lag_s": 0.0, "drain_s": 2.0, "worker_wait_s": 0.3} | settings
        config = RouterSettings(instance_id=instance_id, registry_url="memory:", **chosen)
        telemetry = configure("router", instance_id, exporter=self._exporter)
        async with running("router", build, config, registry=MemoryRegistry(self.space), telemetry=telemetry) as mesh:
            self.telemetry = telemetry
            yield mesh

    @asynccontextmanager
    async def tokenizer(self, instance_id: str = "tokenizer-0", model: str = "tiny") -> AsyncIterator[TokenizerProcess]:
        servicer = FakeTokenizer()
        server = grpc.aio.server(interceptors=[ErrorsToStatus()])
        tok_rpc.add_TokenizerServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        instance = Instance("meshfire-tokenizer", instance_id, f"127.0.0.1:{port}", {"model": model})
        await self.registry.register(instance)
        try:
            yield TokenizerProcess(servicer, server, self.registry, instance_id)
        finally:
            await self.registry.deregister(instance_id)
            await server.stop(None)

    def prefill(self, worker_id: str = "prefill-0", **options: Any) -> FakeWorker:
        return FakeWorker(MemoryRegistry(self.space), pb.WORKER_ROLE_PREFILL, worker_id, **options)

    def decode(self, worker_id: str = "decode-0", **options: Any) -> FakeWorker:
        return FakeWorker(MemoryRegistry(self.space), pb.WORKER_ROLE_DECODE, worker_id, **options)


async def until(condition: Callable[[], object], *, within_s: float = 5.0) -> None:
    """Wait for something that other tasks bring about."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def joined(texts: Iterable[str]) -> str:
    return "".join(texts)
