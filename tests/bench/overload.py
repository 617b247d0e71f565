"""Goodput under overload: `python -m tests.bench.overload [--seconds 40] [--workers 8]`.

Poisson arrivals at 0.9, 1.3 and 2 times what the workers can do, service times of the conversation trace scaled to a
mean of `--mean-s`, each request with `--deadline-s`. Goodput is what was answered within its deadline through all
arrivals; refusals are misses. The bound is 1 below capacity, else 1 / load: of requests of equal size. Large ones are
refused more often, so goodput, which counts requests, may pass it. Beside it, on the same arrivals and service times,
push in turn and push to the least loaded worker, whose queues drop what is over and know no deadline before; they are
played in virtual time, without any cost of their own. `wait_calibration` is the mean wait of answered requests through
the mean predicted one. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc.aio

from meshfire.api.router.v1 import inference_service_pb2 as pb
from tests.bench._pull_mesh import TRACE, PullMesh, Request, poisson, pull_mesh, requests_of

LOADS = (0.9, 1.3, 2.0)


def push(
    load: Sequence[Request], arrivals: Sequence[float], num_workers: int, deadline_s: float, choose: Callable[..., int]
) -> float:
    """Goodput of queues at workers, in virtual time. What is over when its turn comes costs nothing."""
    free_at = [0.0] * num_workers
    good = 0
    for number, (request, now) in enumerate(zip(load, arrivals, strict=True)):
        worker = choose(number, free_at, now)
        start = max(now, free_at[worker])
        if start >= now + deadline_s:
            continue
        done = start + request.service_s
        # A client that gives up is noticed: the worker stops at its deadline.
        free_at[worker] = min(done, now + deadline_s)
        good += done <= now + deadline_s
    return good / len(load)


def in_turn(number: int, free_at: Sequence[float], now: float) -> int:
    """Round robin."""
    return number % len(free_at)


def least_loaded(number: int, free_at: Sequence[float], now: float) -> int:
    """The worker that is done first: what a perfect view of all queues would choose."""
    return min(range(len(free_at)), key=lambda worker: free_at[worker])


class Outcomes:
    """What became of the requests."""

    def __init__(self) -> None:
        self.good = 0
        self.refused = 0
        self.late = 0
        self.waits: list[tuple[float, float]] = []

    async def ask(self, mesh: PullMesh, request: Request, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            finished: pb.GenerateFinished | None = None
            async for message in mesh.stub.Generate(request.message(pb.PRIORITY_ONLINE), timeout=deadline_s):
                if message.HasField("finished"):
                    finished = message.finished
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self.refused += 1
            else:
                self.late += 1
            return
        if finished is not None and loop.time() - began <= deadline_s:
            self.good += 1
            self.waits.append((finished.receipt.predicted_queue_ms / 1000, finished.receipt.queue_ms / 1000))
        else:
            self.late += 1


async def pull(load: Sequence[Request], arrivals: Sequence[float], num_workers: int, deadline_s: float) -> Outcomes:
    """The same through a real router. The first requests teach it what service takes."""
    outcomes = Outcomes()
    async with pull_mesh(load, num_workers) as mesh:
        await asyncio.gather(*(Outcomes().ask(mesh, one, 60.0) for one in load[: 2 * num_workers]))
        loop = asyncio.get_running_loop()
        start = loop.time()
        async with asyncio.TaskGroup() as group:
            for request, at in zip(load, arrivals, strict=True):
                await asyncio.sleep(max(0.0, start + at - loop.time()))
                group.create_task(outcomes.ask(mesh, request, deadline_s))
    return outcomes


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals at each load")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--mean-s", type=float, default=0.4, help="mean service time")
    parser.add_argument("--deadline-s", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", type=Path, default=TRACE)
    asked = parser.parse_args()
    capacity = asked.workers / asked.mean_s
    result: dict[str, object] = {}
    waits: list[tuple[float, float]] = []
    cases = []
    for load_factor in LOADS:
        count = round(asked.seconds * load_factor * capacity)
        load = requests_of(asked.trace, count, asked.mean_s, asked.seed)
        arrivals = poisson(count, load_factor * capacity, asked.seed)
        bound = min(1.0, 1 / load_factor)
        ours = await pull(load, arrivals, asked.workers, asked.deadline_s)
        waits += ours.waits
        shares = {"": ours.good / count}
        for name, choose in (("push_rr_", in_turn), ("push_ll_", least_loaded)):
            shares[name] = push(load, arrivals, asked.workers, asked.deadline_s, choose)
        suffix = str(load_factor).replace(".", "_")
        result |= {f"{name}goodput_of_bound_{suffix}": share / bound for name, share in shares.items()}
        case = {"load": load_factor, "requests": count, "bound": bound, "refused": ours.refused, "late": ours.late}
        cases.append(case | {f"{name or 'pull_'}goodput": share for name, share in shares.items()})
        print(json.dumps(cases[-1]), flush=True)
    predicted, actual = (sum(one) for one in zip(*(one for one in waits if one[0] > 0), strict=True))
    result |= {"wait_calibration": actual / predicted, "cases": cases}
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
