"""When KV blocks run out the newest sequence computes its tokens anew; no stream sees more than a pause."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.unit.decode.conftest import StartWorker, Worker
from tests.unit.decode.fakes import P, continuation


def num_preemptions(worker: Worker) -> float:
    text = worker.telemetry.prometheus_text().decode()
    found = [line for line in text.splitlines() if line.startswith("meshfire_decode_preemptions_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


@pytest.mark.parametrize("local", [False, True])
async def test_the_newest_is_preempted_and_its_output_goes_on_here(start_worker: StartWorker, local: bool) -> None:
    async with start_worker(num_blocks=6) as worker:
        worker.lease("old", [1, 2, 3, 4], max_tokens=12, local=local)
        worker.lease("new", [5, 6, 7, 8], max_tokens=12, local=local)
        for name, prompt in (("old", [1, 2, 3, 4]), ("new", [5, 6, 7, 8])):
            await worker.link.finished(name)
            assert worker.link.tokens(name) == continuation(prompt, 12)
        assert num_preemptions(worker) > 0
        assert [one for _, one in worker.link.sent if one.HasField("failed")] == []
        await worker.until_idle()
        if not local:
            await worker.until_released(("kv-old-1", True), ("kv-new-1", True))


@pytest.mark.parametrize("seed", range(4))
async def test_many_streams_in_little_memory_get_the_tokens_that_each_gets_alone(
    start_worker: StartWorker, seed: int
) -> None:
    rng = random.Random(seed)
    wishes: dict[str, tuple[list[int], dict[str, Any]]] = {}
    for number in range(14):
        prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 14))]
        sampling = {"temperature": rng.choice([0.0, 2.0]), "seed": rng.randrange(1000)}
        length = rng.randrange(1, 8 * P - len(prompt))
        wishes[f"r{number}"] = prompt, {"max_tokens": length, "sampling": sampling, "local": rng.random() < 0.5}
    async with start_worker(num_blocks=8, max_batch=5, max_waiting=1) as worker:
        for name, (prompt, wish) in wishes.items():
            await worker.link.until(lambda: worker.link.credit[0] > 0)
            worker.lease(name, prompt, **wish)
        for name in wishes:
            await worker.link.finished(name)
        assert num_preemptions(worker) > 0
        await worker.until_idle()
    async with start_worker() as quiet:
        for name, (prompt, wish) in wishes.items():
            quiet.lease(name, prompt, **wish)
            await quiet.link.finished(name)
            assert worker.link.tokens(name) == quiet.link.tokens(name)


async def test_a_read_that_is_preempted_is_done_again(start_worker: StartWorker) -> None:
    async with start_worker(num_blocks=4) as worker:
        worker.reader.gates["kv-new-1"] = asyncio.Event()
        worker.lease("old", [1] * 6, max_tokens=10)
        await worker.link.until(lambda: len(worker.link.progress("old")) > 0)
        worker.lease("new", [5, 6], max_tokens=3)
        await worker.link.finished("old")
        assert worker.link.tokens("old") == continuation([1] * 6, 10)
        worker.reader.gates["kv-new-1"].set()
        await worker.link.finished("new")
        assert worker.link.tokens("new") == continuation([5, 6], 3)
        assert num_preemptions(worker) == 1
        await worker.until_released(("kv-old-1", True), ("kv-new-1", True))


async def test_a_preempted_lease_can_be_cancelled(start_worker: StartWorker) -> None:
    async with start_worker(num_blocks=6) as worker:
        worker.lease("old", [1, 2, 3, 4], max_tokens=19)
        worker.lease("new", [5, 6, 7, 8], max_tokens=19)
        await worker.link.until(lambda: len(worker.link.progress("old")) > 14)
        assert num_preemptions(worker) == 1
        worker.engine.on_cancel("router-0", "new", 1)
        await worker.link.finished("old")
        await worker.until_idle()


async def test_what_was_computed_before_the_preemption_is_matched_again(start_worker: StartWorker) -> None:
    """Blocks of a preempted sequence stay published until somebody needs them."""
    async with start_worker(num_blocks=7) as worker:
        worker.lease("old", [1, 2, 3, 4], max_tokens=12)
        worker.lease("new", [5, 6, 7, 8], max_tokens=13)
        await worker.link.finished("old")
        await worker.link.finished("new")
        assert num_preemptions(worker) > 0
    recomputed = [chunk for step in worker.model.chunks for chunk in step if chunk > 1]
    assert sum(recomputed) < 4 + 12, "not all of it"
