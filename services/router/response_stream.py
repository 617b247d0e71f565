"""A producer in a task of its own, read as a stream.

gRPC may drop the servicer's generator between two messages without running its `finally` in time; a task is cancelled
and cleans up whatever happens. So what must be freed lives in the task, and the generator only hands on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

from meshfire.errors import Cancelled

T = TypeVar("T")

_END = None


class ResponseStream(Generic[T]):
    """`produce(emit)` runs until it returns, raises or is cancelled. A reader that is slow makes `emit` wait."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        produce: Callable[[Callable[[T], Awaitable[None]]], Awaitable[None]],
        *,
        name: str,
        max_waiting: int = 16,
    ) -> None:
        self._queue: asyncio.Queue[T | None] = asyncio.Queue(max_waiting)
        self._error: Exception | None = None
        self._produce = produce
        self._task = tasks.create_task(self._run(), name=name)

    def stop(self) -> None:
        """Cancel the producer; idempotent."""
        self._task.cancel()

    async def __aiter__(self) -> AsyncIterator[T]:
        """What was emitted; then raises what the producer raised."""
        try:
            while (item := await self._queue.get()) is not _END:
                yield item
            if self._error is not None:
                raise self._error
        finally:
            self.stop()

    async def _run(self) -> None:
        try:
            await self._produce(self._queue.put)
        except asyncio.CancelledError:
            self._cut()
            raise
        except Exception as error:
            self._error = error
        await self._queue.put(_END)

    def _cut(self) -> None:
        """End now; nobody wants what is unread."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._error = Cancelled("the call was cancelled")
        self._queue.put_nowait(_END)
