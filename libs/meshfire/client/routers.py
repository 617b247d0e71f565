"""Where routers are: one fixed address, or whatever a registry names at the moment."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from meshfire.discovery.base import Registry, open_registry
from meshfire.errors import NoWorker

ROUTER_SERVICE = "meshfire-router"


class Routers:
    """Addresses to try, in order; each call starts with another one."""

    def __init__(self, addresses: tuple[str, ...] = ()) -> None:
        self._addresses = addresses
        self._known = asyncio.Event()
        self._turn = itertools.count()

    async def follow(self, registry: Registry) -> None:
        """Keep up with discovery until cancelled."""
        async for instances in registry.watch(ROUTER_SERVICE):
            self._addresses = tuple(instance.address for instance in instances)
            if self._addresses:
                self._known.set()

    async def candidates(self, wait_s: float) -> list[str]:
        """All routers. Waits for the first one that discovery names; NoWorker if none comes."""
        if not self._addresses:
            try:
                async with asyncio.timeout(wait_s):
                    await self._known.wait()
            except TimeoutError:
                raise NoWorker(f"no router came into discovery within {wait_s:g} s") from None
        first = next(self._turn) % max(1, len(self._addresses))
        return [*self._addresses[first:], *self._addresses[:first]]


@asynccontextmanager
async def open_routers(target: str) -> AsyncIterator[Routers]:
    """`host:port`, or a registry's URL (consul://…, static:…)."""
    if not target.startswith(("consul:", "static:", "memory:")):
        yield Routers((target,))
        return
    registry = open_registry(target)
    try:
        async with following(registry) as routers:
            yield routers
    finally:
        await registry.close()


@asynccontextmanager
async def following(registry: Registry) -> AsyncIterator[Routers]:
    """Routers of a registry that is open already."""
    routers = Routers()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(routers.follow(registry), name="follow-routers")
        try:
            yield routers
        finally:
            task.cancel()
