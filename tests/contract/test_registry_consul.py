"""What only a real agent can do to a mesh: fail a health check, restart with an empty memory, go away."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from meshfire.discovery.agent import ConsulAgent
from meshfire.discovery.base import Instance
from meshfire.discovery.consul import ConsulRegistry
from meshfire.errors import BadInput, Unavailable

LIMIT_S = 40.0
SERVICE = "meshfire-decode"
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


class Seen:
    """Everything a stream yielded, and a way to wait for the next wanted value."""

    def __init__(self) -> None:
        self.values: list[object] = []
        self._grew = asyncio.Condition()

    async def follow(self, stream: AsyncIterator[object]) -> None:
        async for value in stream:
            async with self._grew:
                self.values.append(value)
                self._grew.notify_all()

    async def until(self, wanted: Callable[[object], bool], start: int = 0) -> None:
        async with asyncio.timeout(LIMIT_S), self._grew:
            await self._grew.wait_for(lambda: any(wanted(value) for value in self.values[start:]))


@asynccontextmanager
async def following(stream: AsyncIterator[object]) -> AsyncIterator[Seen]:
    seen = Seen()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(seen.follow(stream))
        try:
            yield seen
        finally:
            task.cancel()


@asynccontextmanager
async def worker() -> AsyncIterator[tuple[Instance, health.aio.HealthServicer]]:
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await servicer.set("", SERVING)
    await server.start()
    try:
        yield Instance(SERVICE, f"decode-{port}", f"127.0.0.1:{port}", {"model": "m"}), servicer
    finally:
        await server.stop(None)


@asynccontextmanager
async def opened(
    agent: ConsulAgent, *, keep_period_s: float = 0.3, grace_s: float = 4.0
) -> AsyncIterator[ConsulRegistry]:
    registry = ConsulRegistry("127.0.0.1", agent.ports.http, keep_period_s=keep_period_s, grace_s=grace_s)
    try:
        yield registry
    finally:
        await registry.close()


@pytest.fixture
async def agent(consul_binary: Path, tmp_path: Path) -> AsyncIterator[ConsulAgent]:
    async with ConsulAgent(consul_binary, log_file=tmp_path / "consul.log") as running:
        yield running


@pytest.fixture
async def registry(agent: ConsulAgent) -> AsyncIterator[ConsulRegistry]:
    async with opened(agent) as one:
        yield one


async def test_a_server_that_stops_serving_disappears_and_comes_back_when_it_serves_again(
    registry: ConsulRegistry,
) -> None:
    async with worker() as (instance, servicer), following(registry.watch(SERVICE)) as seen:
        await registry.register(instance)
        await seen.until(lambda value: value == (instance,))
        known = len(seen.values)
        await servicer.set("", NOT_SERVING)
        await seen.until(lambda value: value == (), start=known)
        await servicer.set("", SERVING)
        await seen.until(lambda value: value == (instance,), start=known)


async def test_a_server_that_does_not_serve_yet_is_listed_only_once_it_does(registry: ConsulRegistry) -> None:
    async with worker() as (instance, servicer), following(registry.watch(SERVICE)) as seen:
        await servicer.set("", NOT_SERVING)
        await registry.register(instance)
        async with aclosing(registry.watch(SERVICE)) as fresh:
            assert await anext(fresh) == ()
        await servicer.set("", SERVING)
        await seen.until(lambda value: value == (instance,))
        assert seen.values == [(), (instance,)]


async def test_an_agent_that_restarts_empty_is_told_again_and_nobody_ever_sees_an_empty_list(
    agent: ConsulAgent, registry: ConsulRegistry
) -> None:
    # Slower to register again than the watcher is to reconnect, so that the empty answer is really read.
    async with (
        opened(agent, keep_period_s=2.5) as slow,
        opened(agent, grace_s=15.0) as watcher,
        worker() as (instance, _),
        following(watcher.watch(SERVICE)) as seen,
    ):
        await slow.register(instance)
        await seen.until(lambda value: value == (instance,))
        known = len(seen.values)
        await agent.stop()
        await agent.start()
        async with following(registry.watch(SERVICE)) as newcomer:
            await newcomer.until(lambda value: value == (instance,))
        async with worker() as (second, _):  # the old watch is alive and follows the new agent
            await slow.register(second)
            await seen.until(lambda value: len(value) == 2)
            assert [len(value) for value in seen.values[known:]] == [2]  # type: ignore[arg-type]


async def test_an_instance_that_died_while_the_agent_was_away_is_given_up_after_the_grace_period(
    agent: ConsulAgent, registry: ConsulRegistry
) -> None:
    elsewhere = ConsulRegistry("127.0.0.1", agent.ports.http, keep_period_s=0.3)
    async with worker() as (lasting, _), following(registry.watch(SERVICE)) as seen:
        async with worker() as (doomed, _):
            await registry.register(lasting)
            await elsewhere.register(doomed)
            await seen.until(lambda value: len(value) == 2)
            known = len(seen.values)
            await agent.stop()
            await elsewhere.close()
        await agent.start()
        await seen.until(lambda value: value == (lasting,), start=known)
        assert seen.values[known:] == [(lasting,)]


async def test_a_killed_agent_leaves_the_last_good_list_and_document_standing(
    agent: ConsulAgent, registry: ConsulRegistry
) -> None:
    key = "meshfire/placement/m"
    async with (
        worker() as (instance, _),
        following(registry.watch(SERVICE)) as instances,
        following(registry.kv_watch(key)) as documents,
    ):
        await registry.register(instance)
        assert await registry.kv_put(key, b"{}")
        await instances.until(lambda value: value == (instance,))
        await documents.until(lambda entry: entry is not None)
        before = (len(instances.values), len(documents.values))
        assert agent.pid is not None
        os.kill(agent.pid, signal.SIGKILL)
        await agent.stop()
        with pytest.raises(Unavailable):
            await registry.kv_get(key)
        with pytest.raises(Unavailable):
            await registry.kv_put(key, b"lost")
        await asyncio.sleep(1.0)
        assert (len(instances.values), len(documents.values)) == before
        await agent.start()  # empty: the document is forgotten, not deleted
        await asyncio.sleep(1.0)
        assert len(documents.values) == before[1]
        assert await registry.kv_put(key, b"again", expected_index=0)
        await documents.until(lambda entry: entry.value == b"again", start=before[1])


async def test_an_instance_registered_while_no_agent_is_there_appears_when_one_starts(
    agent: ConsulAgent, registry: ConsulRegistry
) -> None:
    await agent.stop()
    async with worker() as (instance, _), following(registry.watch(SERVICE)) as seen:
        await registry.register(instance)
        await agent.start()
        await seen.until(lambda value: value == (instance,))


async def test_a_deleted_document_reads_as_absent(agent: ConsulAgent, registry: ConsulRegistry) -> None:
    async with following(registry.kv_watch("meshfire/k")) as seen, aiohttp.ClientSession() as session:
        await registry.kv_put("meshfire/k", b"v")
        await seen.until(lambda entry: entry is not None)
        known = len(seen.values)
        async with session.delete(f"{agent.http_url}/v1/kv/meshfire/k") as answer:
            assert answer.status == 200
        await seen.until(lambda entry: entry is None, start=known)


async def test_a_document_beyond_the_agents_limit_is_the_callers_error(registry: ConsulRegistry) -> None:
    with pytest.raises(BadInput):
        await registry.kv_put("meshfire/huge", bytes(600 * 1024))


async def test_an_agent_cannot_start_twice_on_the_same_ports(consul_binary: Path, agent: ConsulAgent) -> None:
    with pytest.raises(Unavailable):
        await ConsulAgent(consul_binary, ports=agent.ports).start()
