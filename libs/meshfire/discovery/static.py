"""Discovery on one machine without an agent: a topology file and a directory of live registrations beside it.

Owns polling. Knows no health beyond "its process lives"; formats and atomicity are `topology`'s. A topology file that
breaks while it is being edited does not end a watch: the last good reading stands.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

from meshfire.discovery.base import Instance, KvEntry
from meshfire.discovery.process import ProcessMark
from meshfire.discovery.topology import TopologyFiles
from meshfire.errors import BadInput

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 0.25


class StaticRegistry:
    """`Registry` over files. Every process of the machine that opens the same path sees the same mesh."""

    def __init__(self, path: Path, *, poll_s: float = POLL_S) -> None:
        self._files = TopologyFiles(path)
        self._poll_s = poll_s
        self._own: set[str] = set()
        self._closed = asyncio.Event()

    async def register(self, instance: Instance) -> None:
        self._own.add(instance.instance_id)
        await asyncio.to_thread(self._files.write_instance, instance, ProcessMark.of_this_process())

    async def deregister(self, instance_id: str) -> None:
        self._own.discard(instance_id)
        await asyncio.to_thread(self._files.remove_instance, instance_id)

    def watch(self, service: str) -> AsyncIterator[tuple[Instance, ...]]:
        return self._changes(lambda: self._files.instances_of(service))

    async def kv_get(self, key: str) -> KvEntry | None:
        return await asyncio.to_thread(self._files.read_kv, key)

    async def kv_put(self, key: str, value: bytes, *, expected_index: int | None = None) -> bool:
        return await asyncio.to_thread(self._files.write_kv, key, value, expected_index)

    def kv_watch(self, key: str) -> AsyncIterator[KvEntry | None]:
        return self._changes(lambda: self._files.read_kv(key))

    async def close(self) -> None:
        self._closed.set()
        for instance_id in tuple(self._own):
            await self.deregister(instance_id)

    async def _changes(self, read: Callable[[], T]) -> AsyncIterator[T]:
        shown: list[T] = []  # nothing yet, or the one value last shown
        broken = False
        while not self._closed.is_set():
            try:
                now = await asyncio.to_thread(read)
            except (BadInput, OSError, ValueError) as error:
                if not broken:  # once per breakage, not once per poll
                    log.warning("static registry: keeping the last good reading: %s", error)
                broken = True
            else:
                broken = False
                if shown != [now]:
                    shown = [now]
                    yield now
            await self._pause()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._poll_s):
                await self._closed.wait()
        except TimeoutError:
            return


def open_url(rest: str) -> StaticRegistry:
    """`static:/path/topology.json`; the file need not exist yet."""
    path = Path(rest.removeprefix("//"))
    if not rest or path.is_dir():
        raise BadInput(f"static: needs the path of a file, got {rest!r}", field="registry_url")
    return StaticRegistry(path.absolute())
