"""What one dispatch-and-combine costs: `python -m tests.bench.expert_hop [--transports grpc local] [--shards 1 2]
[--tokens 1 8] [--hops 300]`.

Shards are processes of their own on loopback, with random experts of the shape of `kimi-bench` (hidden 1024, expert
size 512, top-8); the caller is an ExpertMesh with a model thread, as in a worker; one thread of arithmetic per process.
`hop_p50_us` is what the mesh adds: the whole minus the slowest shard's computation. The same experts in this process
are measured beside it. The last line is one JSON object; its p50 and p99 are those of the first case over a lane, which
is what a co-located shard gets; `cases` has all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from meshfire.discovery import open_registry
from meshfire.model.compute.fp32 import Fp32Compute
from meshfire.model.compute.interface import Ffn
from meshfire.model.experts import LocalExperts
from meshfire.model.interface import ExpertBackend, ExpertLayout
from meshfire.model.stored import StoredFfn
from meshfire.placement.shard_map import placement_key, spread
from meshfire.rpc.channels import ChannelPool
from meshfire.runtime.model_thread import ModelThread
from meshfire.runtime.serve import Mesh, Service, run
from meshfire.worker.experts import ExpertMesh
from meshfire.worker.hop_link import HopTransport
from services.expert_shard.config import ExpertShardSettings
from services.expert_shard.core import ExpertStore
from services.expert_shard.server import serving

MODEL, REVISION = "bench", "random"
HIDDEN, INNER, NUM_EXPERTS, TOP_K = 1024, 512, 16, 8
LAYOUT = ExpertLayout(num_experts=(NUM_EXPERTS,), hidden_size=HIDDEN)
WARM_UP_HOPS = 30
READY_S = 120.0


class RandomExperts:
    """ExpertSource of seeded weights."""

    def load(self, layer: int, expert: int) -> Ffn:
        seeded = torch.Generator().manual_seed(expert)
        shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
        gate, up, down = (torch.randn(shape, generator=seeded) / 32 for shape in shapes)
        return Fp32Compute().ffn(StoredFfn.of(gate, up, down))


def serve(shard_id: str, registry_url: str) -> None:
    """The shard process."""
    settings = ExpertShardSettings(
        model=MODEL,
        model_dir=Path("unused"),
        shard_id=shard_id,
        instance_id=shard_id,
        registry_url=registry_url,
        discovery_lag_s=0.0,
    )
    asyncio.run(run("expert_shard", build_random, settings))


@asynccontextmanager
async def build_random(settings: ExpertShardSettings, mesh: Mesh) -> AsyncIterator[Service]:
    async with serving(settings, mesh, ExpertStore(RandomExperts(), LAYOUT), REVISION) as service:
        yield service


@contextmanager
def shard_processes(num_shards: int, registry_url: str) -> Iterator[list[str]]:
    ids = [f"expert-{index}" for index in range(num_shards)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-m", "tests.bench.expert_hop", "--serve", one, registry_url] for one in ids]
    processes = [subprocess.Popen(command, env=environment) for command in commands]
    try:
        yield ids
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=30)


def step_of(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(num_tokens)
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=seeded)[:TOP_K] for _ in range(num_tokens)]).int()
    return torch.randn(num_tokens, HIDDEN, generator=seeded), ids, torch.full((num_tokens, TOP_K), 1 / TOP_K)


def measure(backend: ExpertBackend, num_tokens: int, num_hops: int) -> list[float]:
    """Microseconds of each dispatch-and-combine."""
    step = step_of(num_tokens)
    times = []
    for _ in range(num_hops):
        began = time.perf_counter_ns()
        backend.dispatch(0, *step).result()
        times.append((time.perf_counter_ns() - began) / 1e3)
    return times


def measure_hops(experts: ExpertMesh, num_tokens: int, num_hops: int) -> tuple[list[float], list[float]]:
    """(whole, whole minus the slowest shard's computation) of each dispatch-and-combine, microseconds."""
    whole, added = [], []
    for _ in range(num_hops):
        session = experts.session(deadline=time.monotonic() + 60)
        whole += measure(session, num_tokens, 1)
        added.append(whole[-1] - max(stats.compute_ns for stats in session.stats.values()) / 1e3)
    return whole, added


def quantile(times: list[float], share: float) -> float:
    return round(sorted(times)[int(len(times) * share)], 1)


async def cases_of(
    transport: HopTransport, num_shards: int, token_counts: list[int], num_hops: int
) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        registry_url = f"static:{folder}/topology.json"
        registry, channels = open_registry(registry_url), ChannelPool()
        try:
            with shard_processes(num_shards, registry_url) as ids, ModelThread("bench-model") as thread:
                placement = spread(LAYOUT, ids, epoch=1, model=MODEL, revision=REVISION)
                await registry.kv_put(placement_key(MODEL), placement.to_json())
                async with ExpertMesh.open(
                    MODEL, REVISION, LAYOUT, registry, channels, "bench", transport=transport
                ) as experts:
                    async with asyncio.timeout(READY_S):
                        await experts.ready()
                    return [
                        {"transport": transport} | await one_case(experts, thread, num_shards, count, num_hops)
                        for count in token_counts
                    ]
        finally:
            await channels.close()
            await registry.close()


async def one_case(
    experts: ExpertMesh, thread: ModelThread, num_shards: int, num_tokens: int, num_hops: int
) -> dict[str, object]:
    await thread.run(measure_hops, experts, num_tokens, WARM_UP_HOPS)
    whole, added = await thread.run(measure_hops, experts, num_tokens, num_hops)
    local = LocalExperts(RandomExperts())
    await thread.run(measure, local, num_tokens, WARM_UP_HOPS)
    alone = await thread.run(measure, local, num_tokens, num_hops)
    return {
        "p50_us": quantile(whole, 0.5),
        "p99_us": quantile(whole, 0.99),
        "tokens": num_tokens,
        "hidden": HIDDEN,
        "shards": num_shards,
        "hop_p50_us": quantile(added, 0.5),
        "hop_p99_us": quantile(added, 0.99),
        "inprocess_p50_us": quantile(alone, 0.5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of one expert dispatch-and-combine.")
    parser.add_argument("--serve", nargs=2, metavar=("SHARD_ID", "REGISTRY_URL"), help=argparse.SUPPRESS)
    transports: tuple[HopTransport, ...] = ("grpc", "local")
    parser.add_argument("--transports", nargs="+", choices=transports, default=transports, help="ways to the shards")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2], help="numbers of shards to measure")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8], help="rows of one hop to measure")
    parser.add_argument("--hops", type=int, default=300, help="measured hops per case")
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    cases: list[dict[str, object]] = []
    for num_shards in options.shards:
        for transport in options.transports:
            cases += asyncio.run(cases_of(transport, num_shards, options.tokens, options.hops))
            for case in cases[-len(options.tokens) :]:
                print(case, flush=True)
    print(json.dumps({**next((one for one in cases if one["transport"] == "local"), cases[0]), "cases": cases}))


if __name__ == "__main__":
    main()
