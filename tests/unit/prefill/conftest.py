"""A prefill worker of fakes: real engine, pool, store, shelf and model thread; no socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshfire.kv.block_pool import BlockPool
from meshfire.kv.lease import LeaseTimeouts
from meshfire.kv.store import KvStore
from meshfire.runtime.model_thread import ModelThread
from meshfire.telemetry.setup import Telemetry, configure
from services.prefill.engine import Admission, PrefillEngine
from services.prefill.instruments import PrefillInstruments
from services.prefill.prompt import PromptLimits
from services.prefill.prompt_pass import PromptPass
from services.prefill.shelf import KvShelf
from services.prefill.under_way import UnderWay
from tests.unit.prefill.fakes import (
    BLOCK_TOKENS,
    CONTEXT_TOKENS,
    GEOMETRY,
    VOCAB_SIZE,
    FakeExperts,
    FakeLink,
    FakeModel,
)

NUM_BLOCKS = 12


@dataclass
class Worker:
    """What tests look at."""

    engine: PrefillEngine
    shelf: KvShelf
    pool: BlockPool
    store: KvStore
    model: FakeModel
    experts: FakeExperts
    link: FakeLink
    telemetry: Telemetry
    spans: InMemorySpanExporter
    instruments: PrefillInstruments

    def all_blocks_are_free(self) -> bool:
        self.pool.check()
        return self.pool.num_free == NUM_BLOCKS


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(spans: InMemorySpanExporter) -> Iterator[Telemetry]:
    made = configure("prefill", "prefill-0", exporter=spans)
    yield made
    made.shutdown()


@pytest.fixture
async def worker(telemetry: Telemetry, spans: InMemorySpanExporter) -> AsyncIterator[Worker]:
    pool, store, model, experts, link = (
        BlockPool(NUM_BLOCKS),
        KvStore(GEOMETRY, NUM_BLOCKS),
        FakeModel(),
        FakeExperts(),
        FakeLink(),
    )
    instruments = PrefillInstruments(telemetry.meter)
    freed: list[object] = []
    shelf = KvShelf(
        pool, "prefill-0", LeaseTimeouts(), grant_wait_s=0.05, on_freed=lambda: [one.update_credit() for one in freed]
    )
    with ModelThread("test-model") as thread:
        prompt_pass = PromptPass(
            model, "rev", store, pool, UnderWay(), thread, experts, 6, "prefill-0", telemetry.tracer, instruments
        )
        admission = Admission(PromptLimits(VOCAB_SIZE, CONTEXT_TOKENS, NUM_BLOCKS * BLOCK_TOKENS), 2, hooks_on=True)
        async with asyncio.TaskGroup() as tasks:
            engine = PrefillEngine(admission, prompt_pass, shelf, tasks)
            freed.append(engine)
            engine.attach(link)
            expiry = tasks.create_task(shelf.expire(), name="kv-expiry")
            yield Worker(engine, shelf, pool, store, model, experts, link, telemetry, spans, instruments)
            model.may_run.set()
            await engine.close()
            expiry.cancel()
        assert pool.num_free == NUM_BLOCKS
        pool.check()
