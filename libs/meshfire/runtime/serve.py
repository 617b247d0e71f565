"""One life for every service process.

settings → telemetry → bind → build (load, warm up, find peers) → health SERVING → register → … SIGTERM … → health
NOT_SERVING → deregister → wait out discovery caches → drain → stop the server → close parts in reverse.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import ValidationError

from meshfire.discovery.base import Instance, Registry, open_registry
from meshfire.errors import MeshfireError
from meshfire.rpc.channels import ChannelPool
from meshfire.rpc.interceptors import ErrorsToStatus
from meshfire.rpc.limits import SERVER_OPTIONS
from meshfire.runtime.metrics_endpoint import serve_metrics
from meshfire.runtime.parent import die_with
from meshfire.runtime.settings import ServiceSettings
from meshfire.telemetry.setup import Telemetry, configure

log = logging.getLogger(__name__)
# Part of the package's public surface, missing in its stubs.
_aio_health: Any = vars(health)["aio"]
S = TypeVar("S", bound=ServiceSettings)


@dataclass(frozen=True)
class Mesh:
    """What a service gets from the process it lives in."""

    registry: Registry
    telemetry: Telemetry
    channels: ChannelPool
    instance_id: str
    #: host:port of this process's own gRPC server
    address: str
    test_hooks: bool
    #: for the service's own loops; ends with the process
    tasks: asyncio.TaskGroup


async def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Service:
    """What `build` makes of it."""

    #: adds the servicers to the server
    add_to: Callable[[grpc.aio.Server], None]
    #: full names of the gRPC services, for health and reflection
    names: Sequence[str]
    #: what discovery tells others
    metadata: Mapping[str, str] = field(default_factory=dict)
    #: stop taking work and wait for what runs; bounded by the runtime
    drain: Callable[[], Awaitable[None]] = _nothing


Build = Callable[[S, Mesh], AbstractAsyncContextManager[Service]]


def main(name: str, build: Build[S], settings_type: type[S]) -> None:
    """Run a service until SIGTERM or SIGINT. Exit code 2 for bad settings, 1 for a failed start."""
    try:
        settings = settings_type()
    except ValidationError as error:
        sys.stderr.write(f"{name}: bad settings\n{error}\n")
        sys.exit(2)
    logging.basicConfig(level=settings.log_level, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
    try:
        if settings.parent_pid:
            die_with(settings.parent_pid)
        asyncio.run(run(name, build, settings))
    except* MeshfireError as group:
        for one in _leaves(group):
            log.error("%s: %s", type(one).__name__, one)
        sys.exit(1)


async def run(name: str, build: Build[S], settings: S) -> None:
    """Serve until a signal asks to stop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, stop.set)
    async with running(name, build, settings) as mesh:
        log.info("serving on %s as %s", mesh.address, mesh.instance_id)
        await stop.wait()
        log.info("draining")


@asynccontextmanager
async def running(
    name: str, build: Build[S], settings: S, *, registry: Registry | None = None, telemetry: Telemetry | None = None
) -> AsyncIterator[Mesh]:
    """A serving process, also for tests that run several in one: enter = serving, exit = drained and closed."""
    instance_id = settings.instance_id or f"{name}-{os.getpid()}"
    async with AsyncExitStack() as stack:
        telemetry = telemetry or configure(name, instance_id, otlp_endpoint=settings.otlp_endpoint or None)
        stack.push_async_callback(asyncio.to_thread, telemetry.shutdown)
        if registry is None:
            registry = open_registry(settings.registry_url)
            stack.push_async_callback(registry.close)
        channels = ChannelPool()
        stack.push_async_callback(channels.close)
        server = grpc.aio.server(interceptors=[ErrorsToStatus()], options=SERVER_OPTIONS)
        stack.push_async_callback(server.stop, None)  # also when `build` fails
        port = server.add_insecure_port(f"{settings.host}:{settings.port}")
        if settings.metrics_port:
            stack.enter_context(serve_metrics(settings.host, settings.metrics_port, telemetry))
        tasks = await stack.enter_async_context(_cancelled_at_exit())
        address = f"{settings.advertise_host or settings.host}:{port}"
        mesh = Mesh(registry, telemetry, channels, instance_id, address, settings.test_hooks, tasks)
        service = await stack.enter_async_context(build(settings, mesh))
        probes = _add_probes(server, service)
        service.add_to(server)
        await server.start()
        stack.push_async_callback(server.stop, 1.0)
        await _set_health(probes, service, health_pb2.HealthCheckResponse.SERVING)
        instance = Instance(f"meshfire-{name.replace('_', '-')}", instance_id, mesh.address, dict(service.metadata))
        await registry.register(instance)
        try:
            yield mesh
        finally:
            await _set_health(probes, service, health_pb2.HealthCheckResponse.NOT_SERVING)
            await registry.deregister(instance_id)
            await asyncio.sleep(settings.discovery_lag_s)
            await _bounded(service.drain(), settings.drain_s)


@asynccontextmanager
async def _cancelled_at_exit() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose tasks end with the block; a task that fails ends the process."""
    running: set[asyncio.Task[object]] = set()

    class Group(asyncio.TaskGroup):
        def create_task(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            task = super().create_task(*args, **kwargs)
            running.add(task)
            task.add_done_callback(running.discard)
            return task

    async with Group() as group:
        try:
            yield group
        finally:
            for task in list(running):
                task.cancel()


def _add_probes(server: grpc.aio.Server, service: Service) -> Any:
    probes = _aio_health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(probes, server)
    names = (*service.names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return probes


async def _set_health(probes: Any, service: Service, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
    for name in ("", *service.names):
        await probes.set(name, status)


async def _bounded(work: Awaitable[None], limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await work
    except TimeoutError:
        log.warning("drain did not end within %.1f s; what still runs is cancelled", limit_s)


def _leaves(group: BaseExceptionGroup[MeshfireError]) -> list[MeshfireError]:
    found: list[MeshfireError] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
