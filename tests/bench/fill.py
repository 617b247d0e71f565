"""Asynchronous work beside an online load: `python -m tests.bench.fill [--seconds 60] [--workers 8]`.

Online requests arrive by Poisson at half of what the workers can do, first alone, then with as much asynchronous work
as there is room for. `utilisation` is the share of the slots' time that was used with both, `ttft_growth` how much the
99th percentile of the online requests' time to first token grew (0.1 = 10 %). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import grpc.aio

from meshfire.api.router.v1 import inference_service_pb2 as pb
from tests.bench._pull_mesh import TRACE, PullMesh, Request, poisson, pull_mesh, requests_of

ONLINE_LOAD = 0.5


async def first_token_s(mesh: PullMesh, request: Request) -> float:
    """Of an online request."""
    began = asyncio.get_running_loop().time()
    async for message in mesh.stub.Generate(request.message(pb.PRIORITY_ONLINE), timeout=60):
        if message.HasField("delta"):
            return asyncio.get_running_loop().time() - began
    raise AssertionError("an output has a first token")


async def keep_asking(mesh: PullMesh, load: Sequence[Request], stop: asyncio.Event) -> int:
    """One asynchronous request after the other; how many were answered."""
    answered = 0
    for request in load:
        if stop.is_set():
            break
        call = mesh.stub.Generate(request.message(pb.PRIORITY_ASYNCHRONOUS), timeout=600)
        stopping = asyncio.create_task(stop.wait())
        reading = asyncio.create_task(_read(call))
        await asyncio.wait([stopping, reading], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not reading.done():
            call.cancel()
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await reading
            answered += 1
    return answered


async def _read(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> None:
    async for _ in call:
        pass


async def measure(
    load: Sequence[Request], arrivals: Sequence[float], num_workers: int, num_askers: int
) -> tuple[list[float], float, int]:
    """Times to first token, utilisation while requests arrived, asynchronous answers."""
    online, others = load[: len(arrivals)], load[len(arrivals) :]
    async with pull_mesh(load, num_workers) as mesh:
        await asyncio.gather(*(first_token_s(mesh, one) for one in online[:num_workers]))
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        shares = [others[number::num_askers] for number in range(num_askers)]
        askers = [asyncio.create_task(keep_asking(mesh, share, stop)) for share in shares]
        await asyncio.sleep(2.0)
        start, busy_s = loop.time(), mesh.busy_s
        tasks = []
        for request, at in zip(online, arrivals, strict=True):
            await asyncio.sleep(max(0.0, start + at - loop.time()))
            tasks.append(asyncio.create_task(first_token_s(mesh, request)))
        spent_s, used_s = loop.time() - start, mesh.busy_s - busy_s
        times = await asyncio.gather(*tasks)
        stop.set()
        answered = sum(await asyncio.gather(*askers))
    return times, used_s / spent_s / num_workers, answered


def p99(values: Sequence[float]) -> float:
    """By nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--mean-s", type=float, default=0.4, help="mean service time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", type=Path, default=TRACE)
    asked = parser.parse_args()
    rate = ONLINE_LOAD * asked.workers / asked.mean_s
    count = round(asked.seconds * rate)
    load = requests_of(asked.trace, 4 * count, asked.mean_s, asked.seed)
    arrivals = poisson(count, rate, asked.seed)
    alone, alone_used, _ = await measure(load, arrivals, asked.workers, 0)
    both, used, answered = await measure(load, arrivals, asked.workers, 2 * asked.workers)
    result = {
        "utilisation": used,
        "ttft_growth": p99(both) / p99(alone) - 1,
        "utilisation_online_alone": alone_used,
        "ttft_p99_alone_s": p99(alone),
        "ttft_p99_both_s": p99(both),
        "online_requests": count,
        "asynchronous_answers": answered,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
