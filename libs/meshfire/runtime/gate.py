"""Lets calls in until the service drains, and tells when the last one is out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from meshfire.errors import Draining


class Gate:
    """Belongs to one event loop."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._num_inside = 0
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside for a block. Raises Draining once the gate is closed."""
        if self._closed:
            raise Draining(f"this {self._service} stops and takes no new calls", retry_after_s=1.0)
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._empty.set()

    async def close(self) -> None:
        """Let nobody in any more, and wait until nobody is inside."""
        self._closed = True
        await self._empty.wait()
