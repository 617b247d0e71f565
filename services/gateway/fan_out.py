"""Several Generate calls as one sequence of messages. Owns their tasks and their common end; knows no HTTP.

The first call that fails ends all: an answer with one output missing is no answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

from meshfire.api.router.v1 import inference_service_pb2 as pb
from services.gateway.groups import first_cause

#: Messages that wait for a slow client. When it is full, gRPC's flow control holds the router.
MAX_WAITING = 64

Start = Callable[[], AsyncGenerator[pb.GenerateResponse, None]]
#: index of the call, its message; None = that call ended
_Queue = asyncio.Queue[tuple[int, pb.GenerateResponse | None]]


@asynccontextmanager
async def fan_out(starts: Sequence[Start]) -> AsyncIterator[AsyncIterator[tuple[int, pb.GenerateResponse]]]:
    """Run the calls while the block runs; it iterates over (index of the call, message) until all have ended.

    Leaving the block cancels what still runs. Raises the first error of any call."""
    queue: _Queue = asyncio.Queue(MAX_WAITING)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_pump(index, start, queue), name=f"gateway.generate.{index}")
                for index, start in enumerate(starts)
            ]
            try:
                yield _until_all_ended(queue, len(starts))
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as group:
        raise first_cause(group) from None


async def _pump(index: int, start: Start, queue: _Queue) -> None:
    async with aclosing(start()) as responses:
        async for response in responses:
            await queue.put((index, response))
    await queue.put((index, None))


async def _until_all_ended(queue: _Queue, num_calls: int) -> AsyncIterator[tuple[int, pb.GenerateResponse]]:
    while num_calls:
        index, response = await queue.get()
        if response is None:
            num_calls -= 1
        else:
            yield index, response
