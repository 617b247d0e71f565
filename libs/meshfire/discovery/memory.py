"""Discovery inside one process: the twin of the real registries for tests and for a mesh in one process.

Owns the shared space. Knows no health: an instance is healthy while it is registered. One event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from meshfire.discovery.base import Instance, KvEntry
from meshfire.errors import BadInput

T = TypeVar("T")


class MemorySpace:
    """What every `MemoryRegistry` made from it sees. Plays the part of the agent."""

    def __init__(self) -> None:
        self._instances: dict[str, Instance] = {}
        self._kv: dict[str, KvEntry] = {}
        self._index = 0
        self._watchers: set[asyncio.Event] = set()

    def put_instance(self, instance: Instance) -> None:
        self._instances[instance.instance_id] = instance
        self.wake()

    def drop_instance(self, instance_id: str) -> None:
        self._instances.pop(instance_id, None)
        self.wake()

    def instances_of(self, service: str) -> tuple[Instance, ...]:
        found = (one for one in self._instances.values() if one.service == service)
        return tuple(sorted(found, key=lambda one: one.instance_id))

    def get(self, key: str) -> KvEntry | None:
        return self._kv.get(key)

    def put(self, key: str, value: bytes, expected_index: int | None) -> bool:
        current = self._kv[key].index if key in self._kv else 0
        if expected_index is not None and expected_index != current:
            return False
        self._index += 1
        self._kv[key] = KvEntry(bytes(value), self._index)
        self.wake()
        return True

    def wake(self) -> None:
        """Let every watcher look again."""
        for watcher in self._watchers:
            watcher.set()

    @contextmanager
    def watcher(self) -> Iterator[asyncio.Event]:
        """An event that is set after each change, for as long as the block runs."""
        event = asyncio.Event()
        self._watchers.add(event)
        try:
            yield event
        finally:
            self._watchers.discard(event)


class MemoryRegistry:
    """`Registry` over a space; by default over one of its own."""

    def __init__(self, space: MemorySpace | None = None) -> None:
        self._space = space or MemorySpace()
        self._own: set[str] = set()
        self._closed = False

    async def register(self, instance: Instance) -> None:
        self._own.add(instance.instance_id)
        self._space.put_instance(instance)

    async def deregister(self, instance_id: str) -> None:
        self._own.discard(instance_id)
        self._space.drop_instance(instance_id)

    def watch(self, service: str) -> AsyncIterator[tuple[Instance, ...]]:
        return self._changes(lambda: self._space.instances_of(service))

    async def kv_get(self, key: str) -> KvEntry | None:
        return self._space.get(key)

    async def kv_put(self, key: str, value: bytes, *, expected_index: int | None = None) -> bool:
        return self._space.put(key, value, expected_index)

    def kv_watch(self, key: str) -> AsyncIterator[KvEntry | None]:
        return self._changes(lambda: self._space.get(key))

    async def close(self) -> None:
        self._closed = True
        for instance_id in tuple(self._own):
            await self.deregister(instance_id)
        self._space.wake()

    async def _changes(self, read: Callable[[], T]) -> AsyncIterator[T]:
        with self._space.watcher() as changed:
            last = read()
            yield last
            while True:
                await changed.wait()
                if self._closed:
                    return
                changed.clear()  # before the read, so that a change during the yield is not lost
                now = read()
                if now != last:
                    last = now
                    yield now


def open_url(rest: str) -> MemoryRegistry:
    """A registry with a space of its own; nothing may follow `memory:`."""
    if rest:
        raise BadInput(f"memory: takes no address, got {rest!r}", field="registry_url")
    return MemoryRegistry()
