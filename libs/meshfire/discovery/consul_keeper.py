"""Keeps this process's instances registered with an agent that may restart, forget them, or not be there yet.

Owns the set of instances and the one task that looks after them. Knows nothing of watching.
"""

from __future__ import annotations

import asyncio
import logging
import random

from meshfire.discovery.base import Instance
from meshfire.discovery.consul_client import ConsulClient
from meshfire.errors import MeshfireError, Unavailable

log = logging.getLogger(__name__)


class RegistrationKeeper:
    """Announces at once if it can, and again whenever the agent does not know an instance."""

    def __init__(self, client: ConsulClient, period_s: float) -> None:
        self._client = client
        self._period_s = period_s
        self._wanted: dict[str, Instance] = {}
        # One at a time: an announcement in flight must not land after the withdrawal of the same instance.
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._away = False

    async def add(self, instance: Instance) -> None:
        """Raises BadInput if the agent calls the instance wrong; an agent that is away is retried."""
        async with self._lock:
            self._wanted[instance.instance_id] = instance
            try:
                await self._client.register(instance)
            except Unavailable as error:
                self._note_trouble(error)
        if self._task is None:
            # The port has no scope to put a TaskGroup around; close() is this task's owner and awaits it.
            self._task = asyncio.create_task(self._look_after(), name="consul-registrations")

    async def remove(self, instance_id: str) -> None:
        async with self._lock:
            self._wanted.pop(instance_id, None)
            try:
                await self._client.deregister(instance_id)
            except MeshfireError as error:
                log.warning("could not deregister %s; its health check will: %s", instance_id, error)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for instance_id in tuple(self._wanted):
            await self.remove(instance_id)

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(self._period_s * random.uniform(0.8, 1.2))
            for instance_id in tuple(self._wanted):
                await self._ensure(instance_id)

    async def _ensure(self, instance_id: str) -> None:
        async with self._lock:
            if instance_id not in self._wanted:
                return
            try:
                if not await self._client.knows(instance_id):
                    await self._client.register(self._wanted[instance_id])
                    log.info("registered %s again; the agent did not know it", instance_id)
                self._away = False
            except MeshfireError as error:
                self._note_trouble(error)

    def _note_trouble(self, error: MeshfireError) -> None:
        if not self._away:  # once per outage, not once per period
            log.warning("not registered with Consul now, will retry: %s", error)
        self._away = True
