"""Discovery through a Consul agent: blocking queries that survive the agent's absence.

Owns the watch loop: index handling, pace, backoff, last known good. The calls themselves are `consul_client`'s, keeping
registrations is `consul_keeper`'s, what to believe after trouble is `last_good`'s.
Rules of the loop: Consul's documentation on blocking queries (reset the index when it goes back; a return proves no
change; limit the rate).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from meshfire.discovery.base import Instance, KvEntry
from meshfire.discovery.consul_client import Answer, ConsulClient
from meshfire.discovery.consul_keeper import RegistrationKeeper
from meshfire.discovery.last_good import LastGoodDocument, LastGoodInstances
from meshfire.discovery.pace import Backoff, TokenBucket
from meshfire.errors import BadInput, MeshfireError

log = logging.getLogger(__name__)
T = TypeVar("T")

WAIT_S = 30.0
"""Length of a blocking query."""
KEEP_PERIOD_S = 2.0
"""How often a process asks whether the agent still knows it."""
GRACE_S = 15.0
"""After trouble, services get this long to register again before they count as gone; several keep periods."""
POLLS_PER_S = 5.0
POLL_BURST = 4
BACKOFF_FIRST_S = 0.2
BACKOFF_MOST_S = 3.0


class _Belief(Protocol[T]):
    """What `last_good` offers to the loop."""

    def trouble(self) -> None: ...

    def answered(self, value: T, now_s: float, /) -> T: ...

    def patience_s(self, now_s: float, most_s: float, /) -> float: ...


class ConsulRegistry:
    """`Registry` over one agent."""

    def __init__(self, host: str, port: int, *, keep_period_s: float = KEEP_PERIOD_S, grace_s: float = GRACE_S) -> None:
        self._client = ConsulClient(host, port)
        self._keeper = RegistrationKeeper(self._client, keep_period_s)
        self._grace_s = grace_s
        self._closed = asyncio.Event()

    async def register(self, instance: Instance) -> None:
        await self._keeper.add(instance)

    async def deregister(self, instance_id: str) -> None:
        await self._keeper.remove(instance_id)

    def watch(self, service: str) -> AsyncIterator[tuple[Instance, ...]]:
        belief = LastGoodInstances(self._grace_s)
        return self._follow(service, lambda index, wait_s: self._client.instances(service, index, wait_s), belief)

    async def kv_get(self, key: str) -> KvEntry | None:
        return await self._client.get(key)

    async def kv_put(self, key: str, value: bytes, *, expected_index: int | None = None) -> bool:
        return await self._client.put(key, value, expected_index)

    def kv_watch(self, key: str) -> AsyncIterator[KvEntry | None]:
        return self._follow(key, lambda index, wait_s: self._client.document(key, index, wait_s), LastGoodDocument())

    async def close(self) -> None:
        self._closed.set()
        try:
            await self._keeper.close()
        finally:
            await self._client.close()

    async def _follow(
        self, what: str, ask: Callable[[int, float], Awaitable[Answer[T]]], belief: _Belief[T]
    ) -> AsyncIterator[T]:
        clock = asyncio.get_running_loop().time
        bucket = TokenBucket(POLLS_PER_S, POLL_BURST, clock())
        backoff = Backoff(BACKOFF_FIRST_S, BACKOFF_MOST_S)
        shown: list[T] = []  # nothing yet, or the one value last shown
        index = 0
        away = False
        while not self._closed.is_set():
            await self._pause(bucket.take(clock()))
            if self._closed.is_set():
                return
            try:
                answer = await ask(index, belief.patience_s(clock(), WAIT_S))
            except MeshfireError as error:
                if self._closed.is_set():
                    return
                if not away:  # once per outage
                    log.warning("watch of %s keeps what it knows: %s", what, error)
                away, index = True, 0
                belief.trouble()
                await self._pause(backoff.failed())
                continue
            away = False
            backoff.succeeded()
            if answer.index < index:  # the agent restarted or was restored
                belief.trouble()
                index = 0
            else:
                index = max(answer.index, 1)
            value = belief.answered(answer.value, clock())
            if shown != [value]:
                shown = [value]
                yield value

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not past close()."""
        if seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            return


def open_url(rest: str) -> ConsulRegistry:
    """`consul://HOST:PORT`; the port may be left out."""
    parts = urlsplit(rest, allow_fragments=False)
    try:
        host, port = parts.hostname, parts.port or 8500
    except ValueError as error:
        raise BadInput(f"consul:{rest}: {error}", field="registry_url") from error
    if not host:
        raise BadInput(f"consul:{rest}: expected consul://HOST:PORT", field="registry_url")
    return ConsulRegistry(host, port)
