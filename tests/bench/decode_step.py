"""What a decode step costs beside the model: the real engine over a tiny model, without sockets.

    python -m tests.bench.decode_step [--model NAME] [--tokens N] [--speculation off|prompt-lookup]

For batch 1, 8 and 32: steps/s and tokens/s of the engine (leases in, progress messages out, packed as bytes as the link
would) and, of each step, the microseconds outside the model's forward and head, which no model makes faster. The
prompts' KV is computed by the worker itself. `--model`: one of the model cache instead of the tiny one, for what
speculation is worth. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshfire import modelstore
from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.kv.block_pool import BlockPool
from meshfire.kv.journal import BlockJournal
from meshfire.kv.store import KvStore
from meshfire.kv.transfer import KvManifest
from meshfire.model import registry
from meshfire.model.experts import LocalExperts as InProcessExperts
from meshfire.model.interface import CausalLM, ExpertBackend, ForwardBatch, KvView
from meshfire.runtime.model_thread import ModelThread
from meshfire.sched.parts import ChunkBudget
from meshfire.sched.policy import Scheduler
from meshfire.telemetry.setup import configure
from meshfire.worker.ports import LocalExperts
from services.decode.engine import DecodeEngine, Identity
from services.decode.instruments import DecodeInstruments
from services.decode.kv_reader import KvRead, KvSource
from services.decode.rules import RuleBook
from services.decode.speculation import Speculation
from services.decode.stepper import Stepper
from services.decode.table import LeaseTable
from services.decode.wire import WorkerFacts
from tests import oracles

BATCHES = (1, 8, 32)
PROMPT_TOKENS = 48


class TimedModel:
    """A model whose time is taken."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self.seconds = 0.0
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: ForwardBatch, kv: KvView, experts: ExpertBackend) -> Tensor:
        started = time.perf_counter()
        hidden = self._model.forward(batch, kv, experts)
        self.seconds += time.perf_counter() - started
        self.num_steps += 1
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        started = time.perf_counter()
        logits = self._model.logits(hidden)
        self.seconds += time.perf_counter() - started
        return logits


class NoReader:
    """No lease comes with KV."""

    async def read(self, source: KvSource, wanted: KvManifest, block_table: Any, num_held_blocks: int) -> KvRead:
        raise NotImplementedError

    async def release(self, source: KvSource, *, acknowledged: bool) -> None:
        raise NotImplementedError


@dataclass
class CountingLink:
    """A link that packs what it is given and forgets it."""

    num_tokens: int = 0
    num_finished: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, router_id: str, message: pb.WorkRequest) -> None:
        message.SerializeToString()
        self.num_tokens += sum(len(one.token_ids) for one in message.progress.tokens)
        self.num_finished += message.HasField("finished")
        self.changed.set()

    def set_credit(self, num_slots: int, num_free_blocks: int, num_pending_tokens: int = 0) -> None:
        """Nobody needs it."""

    async def until(self, num_finished: int) -> None:
        while self.num_finished < num_finished:
            self.changed.clear()
            await self.changed.wait()


def lease_of(number: int, num_tokens: int) -> pb.Lease:
    generator = torch.Generator().manual_seed(number)
    prompt = torch.randint(0, 256, (PROMPT_TOKENS,), generator=generator).tolist()
    params = sampling_pb2.SamplingParams(max_tokens=num_tokens, temperature=0, seed=1, ignore_eos=True)
    work = pb.DecodeWork(token_ids=prompt, num_prompt_tokens=len(prompt), sampling=params)
    return pb.Lease(request_id=f"r{number}", epoch=1, remaining_ms=600_000, decode=work)


async def measure(directory: Path, batch: int, num_tokens: int, speculation: str) -> dict[str, float]:
    """One run; the first tokens are the warm-up."""
    facts = registry.describe(directory)
    model = TimedModel(registry.load(directory))
    geometry = model.geometry
    num_blocks = batch * (-(-(PROMPT_TOKENS + num_tokens + 32) // geometry.block_tokens) + 1)
    store, pool = KvStore(geometry, num_blocks), BlockPool(num_blocks, BlockJournal())
    telemetry = configure("decode", "decode-0")
    instruments = DecodeInstruments(telemetry.meter)
    scheduler = Scheduler(pool, block_tokens=geometry.block_tokens, max_active=batch, max_waiting=0)
    table = LeaseTable(scheduler, ChunkBudget(256, 4096), Speculation.named(speculation, 4))
    experts = LocalExperts(InProcessExperts(registry.open_experts(directory)))
    limits = WorkerFacts("m", model.vocab_size, model.context_tokens, (), {})
    identity = Identity("decode-0.bench", "decode-0", limits, facts.revision, geometry)
    link, rules = CountingLink(), RuleBook(None)
    with ModelThread("bench") as thread:
        stepper = Stepper(model, store, thread, experts, table, 10.0, instruments)
        tracer = telemetry.tracer
        engine = DecodeEngine(identity, table, NoReader(), stepper, rules, experts, tracer, instruments)
        running = asyncio.create_task(engine.run(link), name="engine")
        await asyncio.sleep(0)
        for number in range(batch):
            engine.on_lease("router", lease_of(number, num_tokens))
        while link.num_tokens < 4 * batch:
            await asyncio.sleep(0.001)
        before = (link.num_tokens, model.num_steps, model.seconds)
        started = time.perf_counter()
        await link.until(batch)
        seconds = time.perf_counter() - started
        tokens, steps, inside = (after - was for after, was in zip(_now(link, model), before))
        running.cancel()
        await asyncio.wait([running])
    rules.close()
    telemetry.shutdown()
    return {
        "steps_per_s": steps / seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_step": tokens / steps,
        "outside_us": (seconds - inside) / steps * 1e6,
    }


def _now(link: CountingLink, model: TimedModel) -> tuple[int, int, float]:
    return link.num_tokens, model.num_steps, model.seconds


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tokens", type=int, default=200)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--speculation", default="off")
    arguments.add_argument("--model", default="")
    arguments.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    options = arguments.parse_args()
    print(f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    points = []
    with tempfile.TemporaryDirectory() as folder:
        named = options.model
        directory = modelstore.resolve(named) if named else oracles.make_llama_checkpoint(Path(folder) / "model")
        for batch in options.batches:
            runs = [
                asyncio.run(measure(directory, batch, options.tokens, options.speculation))
                for _ in range(options.repeats)
            ]
            point = {name: round(statistics.median(run[name] for run in runs), 1) for name in runs[0]}
            print(f"batch {batch}: {point}", flush=True)
            points.append({"batch": batch, **point})
    print(json.dumps({"points": points}))


if __name__ == "__main__":
    main()
