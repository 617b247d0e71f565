"""A decode worker of fakes: real engine, scheduler, pool, store and model thread; no socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.kv.block_pool import BlockPool
from meshfire.kv.store import KvStore
from meshfire.runtime.model_thread import ModelThread
from meshfire.sched.parts import ChunkBudget
from meshfire.sched.policy import Scheduler
from meshfire.telemetry.setup import Telemetry, configure
from services.decode.engine import DecodeEngine, Identity
from services.decode.instruments import DecodeInstruments
from services.decode.rules import RuleBook
from services.decode.speculation import Speculation
from services.decode.stepper import Stepper
from services.decode.table import LeaseTable
from services.decode.wire import WorkerFacts
from tests.unit.decode.fakes import (
    CONTEXT_TOKENS,
    END_ID,
    GEOMETRY,
    VOCAB_SIZE,
    FakeExperts,
    FakeLink,
    FakeModel,
    FakeReader,
    P,
)

ROUTER = "router-0"
NO_DRAFTS = Speculation()
SMALL_CHUNKS = ChunkBudget(beside_others=3, alone=5)


@dataclass
class Worker:
    """What tests look at."""

    engine: DecodeEngine
    table: LeaseTable
    pool: BlockPool
    reader: FakeReader
    model: FakeModel
    experts: FakeExperts
    link: FakeLink
    telemetry: Telemetry
    spans: InMemorySpanExporter

    def lease(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        epoch: int = 1,
        router_id: str = ROUTER,
        num_prompt_tokens: int | None = None,
        remaining_ms: int = 60_000,
        traceparent: str = "",
        fault: str = "",
        max_tokens: int = 8,
        sampling: dict[str, Any] | None = None,
        local: bool = False,
        **work: Any,
    ) -> None:
        """Lease the continuation of `token_ids`, whose KV waits at the fake prefill worker, or, if `local`, must be
        computed. Greedy unless told."""
        kv_lease_id = "" if local else f"kv-{request_id}-{epoch}"
        self.reader.tokens[kv_lease_id] = list(token_ids)
        params = {"max_tokens": max_tokens, "temperature": 0.0, "seed": 1} | (sampling or {})
        decode = pb.DecodeWork(
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens or len(token_ids),
            kv_lease_id=kv_lease_id,
            kv_address="" if local else "prefill:1",
            sampling=sampling_pb2.SamplingParams(**params),
            **work,
        )
        lease = pb.Lease(
            request_id=request_id,
            epoch=epoch,
            remaining_ms=remaining_ms,
            traceparent=traceparent,
            fault=fault,
            decode=decode,
        )
        self.engine.on_lease(router_id, lease)

    async def until_idle(self) -> None:
        """Nothing is left of any lease."""
        await self.link.until(lambda: self.link.credit[1] == self.pool.num_blocks and len(self.table) == 0)
        self.pool.check()
        assert self.pool.num_free == self.pool.num_blocks

    async def until_released(self, *expected: tuple[str, bool]) -> None:
        """The KV's owners were told exactly this, in whatever order."""
        async with asyncio.timeout(20):
            while len(self.reader.released) < len(expected):
                await asyncio.sleep(0.002)
        assert sorted(self.reader.released) == sorted(expected)

    async def until_entered(self) -> None:
        """The model thread is inside a step."""
        async with asyncio.timeout(20):
            while not self.model.entered.is_set():
                await asyncio.sleep(0.002)


StartWorker: TypeAlias = "Callable[..., AbstractAsyncContextManager[Worker]]"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(spans: InMemorySpanExporter) -> Iterator[Telemetry]:
    made = configure("decode", "decode-0", exporter=spans)
    yield made
    made.shutdown()


@pytest.fixture
def start_worker(telemetry: Telemetry, spans: InMemorySpanExporter) -> StartWorker:
    @asynccontextmanager
    async def start(
        *,
        num_blocks: int = 40,
        max_batch: int = 4,
        max_waiting: int = 2,
        hooks_on: bool = True,
        rules: RuleBook | None = None,
        budget: ChunkBudget = SMALL_CHUNKS,
        speculation: Speculation = NO_DRAFTS,
    ) -> AsyncIterator[Worker]:
        pool, store = BlockPool(num_blocks), KvStore(GEOMETRY, num_blocks)
        model, reader, experts, link = FakeModel(), FakeReader(store), FakeExperts(), FakeLink()
        scheduler = Scheduler(pool, block_tokens=P, max_active=max_batch, max_waiting=max_waiting)
        table = LeaseTable(scheduler, budget, speculation)
        instruments = DecodeInstruments(telemetry.meter)
        limit = min(CONTEXT_TOKENS, num_blocks * P)
        facts = WorkerFacts("fake", VOCAB_SIZE, limit, (END_ID,), {}, hooks_on)
        identity = Identity("decode-0.abc", "decode-0", facts, "rev", GEOMETRY)
        with ModelThread("test-model") as thread:
            stepper = Stepper(model, store, thread, experts, table, 10.0, instruments)
            rules = rules or RuleBook(None)
            engine = DecodeEngine(identity, table, reader, stepper, rules, experts, telemetry.tracer, instruments)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(engine.run(link), name="decode-engine")
                await link.until(lambda: link.credit != (0, 0))
                yield Worker(engine, table, pool, reader, model, experts, link, telemetry, spans)
                model.may_run.set()
                running.cancel()
            rules.close()
        pool.check()
        assert pool.num_free == num_blocks

    return start


@pytest.fixture
async def worker(start_worker: StartWorker) -> AsyncIterator[Worker]:
    async with start_worker() as made:
        yield made
