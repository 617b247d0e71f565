"""One caller's held stream: hops are read ahead while earlier ones compute, and answered in order.

Owns the queue between reading and computing and its bound: a caller that sends faster than the shard computes is held
back by flow control. Knows nothing of weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from meshfire.api.expert_shard.v1 import expert_shard_service_pb2 as pb

#: (request, time.perf_counter_ns() at arrival)
Arrival = tuple[pb.ForwardRequest, int]


class ReadAhead:
    """Requests of a stream with their time of arrival.

    `run()` reads and lives in a TaskGroup; it keeps an error of the stream for the one who iterates.
    """

    def __init__(self, requests: AsyncIterator[pb.ForwardRequest], max_queued: int) -> None:
        self._requests = requests
        self._queue: asyncio.Queue[Arrival | None] = asyncio.Queue(max_queued)
        self._error: Exception | None = None

    async def run(self) -> None:
        """Read until the caller is done."""
        try:
            async for request in self._requests:
                await self._queue.put((request, time.perf_counter_ns()))
        except Exception as error:  # the stream broke: its holder raises it
            self._error = error
        await self._queue.put(None)

    def stop(self) -> None:
        """End the iteration after what has arrived; what is not read yet is the caller's to send elsewhere."""
        if self._queue.full():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Arrival]:
        while (arrival := await self._queue.get()) is not None:
            yield arrival
        if self._error is not None:
            raise self._error
