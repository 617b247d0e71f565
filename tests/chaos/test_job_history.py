"""Ten thousand items of jobs on a real mesh: routers and workers are killed all the time, wall clocks jump.

Takes minutes: `make chaos`. `MESHFIRE_CHAOS_SEED` repeats a run's choices, `MESHFIRE_CHAOS_ITEMS` changes its length.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import inference_service_pb2 as generate_pb
from meshfire.api.router.v1 import job_service_pb2 as pb
from meshfire.api.router.v1 import job_service_pb2_grpc as rpc
from meshfire.modelstore.make import make_model
from meshfire.store.database import Database
from tests.chaos.history import History, Snapshot, snapshot
from tests.e2e.mesh_process import MeshProcess, start_mesh
from tests.postgres import PostgresServer, find_postgres

log = logging.getLogger(__name__)

NUM_ITEMS = int(os.environ.get("MESHFIRE_CHAOS_ITEMS", "10000"))
ITEMS_PER_JOB = 250
NUM_PROMPTS = 40
ACCOUNT = "a" * 32
VICTIMS = ["router-0", "router-1", "prefill-0", "prefill-1", "decode-0", "decode-1"]
#: a killed process takes some seconds to come back: more often, and nothing would ever be up
KILL_EVERY_S = (3.0, 12.0)
LIMIT_S = 1500.0
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")

pytestmark = pytest.mark.long


class Clocks:
    """The wall clock of every process of the mesh, where libfaketime is installed."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self._file.write_text("+0\n")

    @property
    def env(self) -> dict[str, str]:
        if not FAKETIME.exists():
            return {}
        return {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_CACHE_DURATION": "1",
        }

    def jump(self, offset_s: int) -> None:
        temporary = self._file.with_suffix(".new")
        temporary.write_text(f"{offset_s:+d}\n")
        temporary.replace(self._file)


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.db'}"
        return
    binaries = find_postgres()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed")
    with PostgresServer(binaries) as server:
        yield server.new_database()


def item(number: int) -> pb.JobItem:
    """One of few prompts, so that equal ones must have equal answers."""
    sampling = sampling_pb2.SamplingParams(max_tokens=1 + number % 3, temperature=0, ignore_eos=True)
    tokens = generate_pb.TokenIds(ids=[10 + number % NUM_PROMPTS, 20, 30])
    call = pb.JobCall(request=generate_pb.GenerateRequest(model="m", token_ids=tokens, sampling=sampling))
    return pb.JobItem(reference=f"r{number}", calls=[call])


async def submit(mesh: MeshProcess, history: History, first: int, draw: random.Random) -> None:
    """Until a router acknowledges it. One that was taken but not acknowledged may run as well: nobody counts on it."""
    items = [item(number) for number in range(first, first + ITEMS_PER_JOB)]
    while True:
        address = str(mesh.process_of(draw.choice(["router-0", "router-1"]))["address"])
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                answer = await rpc.JobServiceStub(channel).SubmitJob(
                    pb.SubmitJobRequest(model="m", items=items),
                    metadata=(("x-meshfire-account", ACCOUNT),),
                    timeout=20,
                )
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.5)
            continue
        history.acknowledged[answer.job.job_id] = [one.reference for one in items]
        return


def is_done(history: History, seen: Snapshot) -> bool:
    """Every acknowledged job has ended, or is lost, which the judgement will say."""
    jobs = [seen.jobs.get(job_id) for job_id in history.acknowledged]
    return all(job is None or job.status.value not in ("queued", "running") for job in jobs)


async def torment(mesh: MeshProcess, clocks: Clocks, draw: random.Random, stop: asyncio.Event) -> int:
    """Kill and shift until stopped; how often somebody was killed."""
    killed = 0
    while not stop.is_set():
        await asyncio.sleep(draw.uniform(*KILL_EVERY_S))
        name = draw.choice(VICTIMS)
        process = mesh.process_of(name)
        if process["health"] == "serving":
            try:
                mesh.kill(name)
                killed += 1
            except ProcessLookupError:
                pass
        if draw.random() < 0.3:
            clocks.jump(draw.randint(-600, 600))
    return killed


@pytest.mark.timeout(LIMIT_S + 300)
async def test_no_item_is_lost_or_done_twice_while_everybody_dies(store_url: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("MESHFIRE_CHAOS_SEED", str(time.time_ns() % 10**6)))
    log.info("MESHFIRE_CHAOS_SEED=%d", seed)
    draw, history, clocks = random.Random(seed), History(), Clocks(tmp_path)
    make_model("llama-tiny", tmp_path / "model", seed=1)
    topology = {
        "mesh": "history",
        "http_port": 0,
        "routers": 2,
        "store_url": store_url,
        "models": [{"model": str(tmp_path / "model"), "name": "m", "prefill": 2, "decode": 2, "expert_shards": 0}],
    }
    env = clocks.env | {"MESHFIRE_ROUTER_JOB_BEAT_S": "1", "MESHFIRE_ROUTER_JOB_SILENT_S": "6"}
    with start_mesh(topology, tmp_path, env) as mesh:
        database, stop = await Database.open(store_url), asyncio.Event()
        tormenting = asyncio.create_task(torment(mesh, clocks, draw, stop))
        try:
            async with asyncio.timeout(LIMIT_S):
                for first in range(0, NUM_ITEMS, ITEMS_PER_JOB):
                    await submit(mesh, history, first, draw)
                while not is_done(history, seen := await snapshot(database)):
                    for job_id in history.acknowledged:
                        history.saw(job_id, seen.items.get(job_id, ()))
                    await asyncio.sleep(2.0)
        finally:
            stop.set()
            killed = await tormenting
        end = await snapshot(database)
        await database.close()
    assert history.judge(end) == []
    answers: dict[int, set[tuple[int, ...]]] = {}
    for job_id in history.acknowledged:
        for one in end.items[job_id]:
            outcome = pb.JobOutcome.FromString(one.result or b"")
            tokens = tuple(token for part in outcome.outputs[0].messages for token in part.delta.token_ids)
            number = int(one.reference[1:])
            assert len(tokens) == 1 + number % 3
            answers.setdefault(number % NUM_PROMPTS, set()).add(tokens[:1])
    assert {len(first_tokens) for first_tokens in answers.values()} == {1}, "equal prompts, equal words"
    log.info("%d items, %d kills, %d results seen under way", NUM_ITEMS, killed, len(history.seen))
    log.info("clocks that jump: %s", bool(clocks.env))
    assert killed > 5
