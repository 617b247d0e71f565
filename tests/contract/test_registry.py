"""One suite for every registry: memory, files, and a real Consul agent behave alike towards the mesh."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from meshfire.discovery.agent import ConsulAgent
from meshfire.discovery.base import Instance, Registry
from meshfire.discovery.consul import ConsulRegistry
from meshfire.discovery.memory import MemoryRegistry, MemorySpace
from meshfire.discovery.static import StaticRegistry

LIMIT_S = 30.0
"""Only against hanging; nothing asserts how long a thing takes."""

Open = Callable[[], Registry]


@asynccontextmanager
async def grpc_server() -> AsyncIterator[tuple[str, health.aio.HealthServicer]]:
    """A server whose health is SERVING: (address, servicer)."""
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        await server.stop(None)


async def seen(stream: AsyncIterator[object], wanted: Callable[[object], bool]) -> list[object]:
    """What the stream yields up to and including the first wanted value."""
    values: list[object] = []
    async with asyncio.timeout(LIMIT_S):
        async for value in stream:
            values.append(value)
            if wanted(value):
                return values
    raise AssertionError(f"the stream ended after {values}")


def ids(value: object) -> list[str]:
    assert isinstance(value, tuple)
    return [one.instance_id for one in value]


def has_ids(*wanted: str) -> Callable[[object], bool]:
    return lambda value: ids(value) == list(wanted)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent_of_module(consul_binary: Path) -> AsyncIterator[ConsulAgent]:
    async with ConsulAgent(consul_binary) as agent:
        yield agent


@pytest.fixture(params=["memory", "static", "consul"])
def implementation(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """What makes a registry; not async itself, because the agent lives on the module's loop."""
    if request.param == "consul":
        port = request.getfixturevalue("agent_of_module").ports.http
        return lambda: ConsulRegistry("127.0.0.1", port, keep_period_s=0.3, grace_s=2.0)
    if request.param == "static":
        return lambda: StaticRegistry(tmp_path / "topology.json", poll_s=0.05)
    space = MemorySpace()
    return lambda: MemoryRegistry(space)


@pytest.fixture
async def open_one(implementation: Open) -> AsyncIterator[Open]:
    """Opens one more registry of the same mesh; all are closed at the end."""
    opened: list[Registry] = []

    def open_registry() -> Registry:
        registry = implementation()
        opened.append(registry)
        return registry

    yield open_registry
    for registry in opened:
        await registry.close()


@pytest.fixture
def service(request: pytest.FixtureRequest) -> str:
    """A name of the test's own, because the tests share one agent."""
    return "t-" + "".join(letter if letter.isalnum() else "-" for letter in request.node.name)


async def test_a_watch_begins_with_an_empty_list_for_a_service_nobody_registered(open_one: Open, service: str) -> None:
    async with aclosing(open_one().watch(service)) as stream:
        assert await anext(stream) == ()


async def test_a_registered_instance_is_seen_whole_by_another_process_and_gone_after_deregistration(
    open_one: Open, service: str
) -> None:
    mine, theirs = open_one(), open_one()
    async with grpc_server() as (address, _), aclosing(theirs.watch(service)) as stream:
        instance = Instance(service, f"{service}-1", address, {"model": "m", "shard_id": "expert-0"})
        await mine.register(instance)
        assert (await seen(stream, has_ids(instance.instance_id)))[-1] == (instance,)
        await mine.deregister(instance.instance_id)
        assert (await seen(stream, has_ids()))[-1] == ()


async def test_instances_come_ordered_and_only_those_of_the_service(open_one: Open, service: str) -> None:
    registry = open_one()
    async with grpc_server() as (address, _), aclosing(registry.watch(service)) as stream:
        await registry.register(Instance(service + "-other", f"{service}-x", address))
        await registry.register(Instance(service, f"{service}-b", address))
        await registry.register(Instance(service, f"{service}-a", address))
        await seen(stream, has_ids(f"{service}-a", f"{service}-b"))


async def test_registering_the_same_id_again_replaces_it(open_one: Open, service: str) -> None:
    registry = open_one()
    async with grpc_server() as (address, _), aclosing(registry.watch(service)) as stream:
        for revision in ("1", "2"):
            await registry.register(Instance(service, f"{service}-1", address, {"model_revision": revision}))
        values = await seen(stream, lambda value: [one.metadata.get("model_revision") for one in value] == ["2"])
        assert all(len(value) <= 1 for value in values)


async def test_an_unchanged_list_is_not_yielded_twice(open_one: Open, service: str) -> None:
    registry = open_one()
    async with grpc_server() as (address, _), aclosing(registry.watch(service)) as stream:
        first = Instance(service, f"{service}-1", address)
        await registry.register(first)
        values = await seen(stream, has_ids(f"{service}-1"))
        await registry.register(first)
        await registry.register(Instance(service + "-other", f"{service}-x", address))
        await registry.register(Instance(service, f"{service}-2", address))
        values += await seen(stream, has_ids(f"{service}-1", f"{service}-2"))
        assert all(before != after for before, after in itertools.pairwise(values))


async def test_deregistering_an_unknown_id_is_no_error(open_one: Open, service: str) -> None:
    await open_one().deregister(f"{service}-nobody")


async def test_closing_a_registry_withdraws_what_it_registered(open_one: Open, service: str) -> None:
    mine, theirs = open_one(), open_one()
    async with grpc_server() as (address, _), aclosing(theirs.watch(service)) as stream:
        await mine.register(Instance(service, f"{service}-1", address))
        await seen(stream, has_ids(f"{service}-1"))
        await mine.close()
        await seen(stream, has_ids())


async def test_a_document_is_absent_then_written_once_then_guarded_by_its_index(open_one: Open, service: str) -> None:
    mine, theirs = open_one(), open_one()
    key = f"meshfire/{service}"
    assert await mine.kv_get(key) is None
    assert await mine.kv_put(key, b"\x00\xff one", expected_index=0)
    assert not await theirs.kv_put(key, b"late", expected_index=0)
    first = await theirs.kv_get(key)
    assert first is not None
    assert first.value == b"\x00\xff one"
    assert await theirs.kv_put(key, b"two", expected_index=first.index)
    assert not await mine.kv_put(key, b"lost race", expected_index=first.index)
    second = await mine.kv_get(key)
    assert second is not None
    assert second.value == b"two"
    assert second.index > first.index > 0
    assert await mine.kv_put(key, b"")
    assert (await mine.kv_get(key)).value == b""  # type: ignore[union-attr]


async def test_exactly_one_of_many_racing_writers_wins_each_version(open_one: Open, service: str) -> None:
    registries = [open_one() for _ in range(4)]
    key = f"meshfire/{service}"
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(registry.kv_put(key, str(at).encode(), expected_index=0))
            for at, registry in enumerate(registries * 2)
        ]
    assert [task.result() for task in tasks].count(True) == 1


async def test_a_watched_document_appears_and_changes(open_one: Open, service: str) -> None:
    mine, theirs = open_one(), open_one()
    key = f"meshfire/{service}"
    async with aclosing(theirs.kv_watch(key)) as stream:
        assert await anext(stream) is None
        for value in (b"one", b"two"):
            assert await mine.kv_put(key, value)
            last = (await seen(stream, lambda entry, value=value: entry is not None and entry.value == value))[-1]
            assert last == await mine.kv_get(key)


async def test_watches_end_when_their_registry_is_closed(open_one: Open, service: str) -> None:
    registry = open_one()
    instances, documents = registry.watch(service), registry.kv_watch(f"meshfire/{service}")
    await anext(instances)
    await anext(documents)

    async def rest(stream: AsyncIterator[object]) -> list[object]:
        return [value async for value in stream]

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(rest(instances)), group.create_task(rest(documents))]
        await asyncio.sleep(0)
        await registry.close()
    assert [task.result() for task in tasks] == [[], []]


async def test_a_cancelled_watch_stops_at_once_and_leaves_the_registry_usable(open_one: Open, service: str) -> None:
    registry = open_one()
    started = asyncio.Event()

    async def follow() -> None:
        async with aclosing(registry.watch(service)) as stream:
            async for _ in stream:
                started.set()

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = group.create_task(follow())
        await started.wait()
        task.cancel()
    assert task.cancelled()
    assert await registry.kv_put(f"meshfire/{service}", b"still here")
