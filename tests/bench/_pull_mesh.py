"""A real router over real gRPC, before workers that only take time: what scheduling benches measure.

A request's service time is that of a conversation trace's request, scaled: a part by its prompt, which the router
sees, and a part by its output, which nobody knows before. A prefill worker's slot is held for all of it; decode takes
nothing.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.api.router.v1 import inference_service_pb2_grpc as rpc
from meshfire.api.router.v1 import work_service_pb2 as work_pb
from meshfire.discovery.memory import MemorySpace
from meshfire.rpc.limits import CHANNEL_OPTIONS
from tests.unit.router.fakes import FakeWorker, TestMesh

TRACE = Path(__file__).resolve().parents[3] / "shared" / "data" / "mooncake-traces" / "conversation_trace.jsonl.gz"
#: trace tokens of one token here: the longest prompt of the trace must fit the fake model's context
TOKENS_EACH = 280
#: of a service time, on average, that the prompt explains
PROMPT_SHARE = 0.7
#: a cancelled worker lets go at the end of its step
STEP_S = 0.02


@dataclass(frozen=True)
class Request:
    """One request of a load. `index` is in its prompt, for the worker to know its service time."""

    index: int
    num_tokens: int
    service_s: float

    def message(self, priority: pb.Priority.ValueType) -> pb.GenerateRequest:
        ids = [self.index // 256, self.index % 256, *([7] * (self.num_tokens - 2))]
        sampling = sampling_pb2.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        return pb.GenerateRequest(model="tiny", token_ids=pb.TokenIds(ids=ids), sampling=sampling, priority=priority)


def requests_of(trace: Path, count: int, mean_s: float, seed: int) -> list[Request]:
    """Requests drawn from a trace, with service times of that mean."""
    with gzip.open(trace, "rt") as lines:
        raw = [json.loads(line) for line in lines]
    draw = random.Random(seed)
    chosen = [draw.choice(raw) for _ in range(count)]
    mean_in = sum(one["input_length"] for one in chosen) / count
    mean_out = sum(one["output_length"] for one in chosen) / count
    return [
        Request(
            index,
            max(3, one["input_length"] // TOKENS_EACH),
            mean_s
            * (PROMPT_SHARE * one["input_length"] / mean_in + (1 - PROMPT_SHARE) * one["output_length"] / mean_out),
        )
        for index, one in enumerate(chosen)
    ]


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """Arrival times in seconds."""
    draw, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        found.append(now)
    return found


@dataclass
class PullMesh:
    """`busy_s` is what the workers' slots were held for."""

    stub: rpc.InferenceServiceAsyncStub
    load: Sequence[Request]
    busy_s: float = 0.0
    begun: dict[int, float] = field(default_factory=dict)

    async def hold(self, worker: FakeWorker, lease: work_pb.Lease, index: int) -> None:
        """A prefill worker's work."""
        if not lease.HasField("prefill"):
            return
        high, low, *_ = lease.prefill.token_ids
        request = self.load[256 * high + low]
        now = asyncio.get_running_loop().time()
        self.begun.setdefault(request.index, now)
        try:
            await asyncio.sleep(request.service_s)
        except asyncio.CancelledError:
            await asyncio.sleep(STEP_S)
            raise
        finally:
            self.busy_s += asyncio.get_running_loop().time() - now


@asynccontextmanager
async def pull_mesh(load: Sequence[Request], num_workers: int) -> AsyncIterator[PullMesh]:
    """One router, `num_workers` prefill workers of one slot each, decode workers with room for all."""
    async with AsyncExitStack() as stack:
        mesh = TestMesh(MemorySpace())
        await stack.enter_async_context(mesh.tokenizer())
        router = await stack.enter_async_context(mesh.router(max_queued_requests=10_000, worker_wait_s=5.0))
        channel = grpc.aio.insecure_channel(router.address, options=CHANNEL_OPTIONS)
        stack.push_async_callback(channel.close)
        made = PullMesh(rpc.InferenceServiceStub(channel), load)
        for number in range(num_workers):
            worker = FakeWorker(mesh.registry, work_pb.WORKER_ROLE_PREFILL, f"p{number}", num_slots=1, gate=made.hold)
            await stack.enter_async_context(worker.up())
        decoder = FakeWorker(mesh.registry, work_pb.WORKER_ROLE_DECODE, "d", num_slots=512, num_blocks=10**6)
        await stack.enter_async_context(decoder.up())
        yield made
