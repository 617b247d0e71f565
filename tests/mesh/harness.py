"""A whole mesh in one process: the services' own `build`s and settings, a memory registry, loopback gRPC between them.

The processes come from `meshfire.cluster.plan`, so the plan is under test as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from meshfire.client import MeshfireClient
from meshfire.cluster import ports
from meshfire.cluster.place import place
from meshfire.cluster.plan import STOP_ORDER, ProcessSpec, Wiring, plan
from meshfire.cluster.resolve import resolve
from meshfire.cluster.topology import Topology, parse
from meshfire.discovery.memory import MemoryRegistry, MemorySpace
from meshfire.runtime.serve import Mesh, running
from meshfire.telemetry.setup import configure


class Spans(SpanExporter):
    """Keeps the spans of all services."""

    def __init__(self) -> None:
        self.ended: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.ended.extend(spans)
        return SpanExportResult.SUCCESS


@dataclass
class InProcessMesh:
    """A running mesh. `client` talks to its first router."""

    specs: Sequence[ProcessSpec]
    spans: Spans
    space: MemorySpace
    client: MeshfireClient = field(init=False)
    meshes: dict[str, Mesh] = field(default_factory=dict)

    def address(self, name: str) -> str:
        return self.meshes[name].address

    @property
    def http_url(self) -> str:
        return f"http://{next(one.http_address for one in self.specs if one.http_address)}"


_JSON = ("models", "models_without_prefill", "model_aliases")


def settings_of(spec: ProcessSpec) -> Any:
    """The service's settings as its process would read them."""
    values: Mapping[str, str] = {
        key.removeprefix(spec.prefix).lower(): value for key, value in spec.env.items() if key.startswith(spec.prefix)
    }
    module = import_module(f"services.{spec.service}.config")
    name = "".join(part.capitalize() for part in spec.service.split("_")) + "Settings"
    settings = getattr(module, name)
    parsed = {key: _json(value) if key in _JSON else value for key, value in values.items()}
    return settings(**parsed, drain_s=2.0, discovery_lag_s=0.0)


def _json(value: str) -> Any:
    import json

    return json.loads(value)


@asynccontextmanager
async def in_process_mesh(
    models: Mapping[str, Path], *, test_hooks: bool = False, local_prefill_max_tokens: int = 0, **counts: Any
) -> AsyncIterator[InProcessMesh]:
    """`models` by served name; `counts` as in a topology's model (prefill, decode, expert_shards, dense_slices)."""
    topology = parse(
        {
            "mesh": "in-process",
            "http_port": 0,
            "test_hooks": test_hooks,
            "local_prefill_max_tokens": local_prefill_max_tokens,
            "models": [{"model": str(path), "name": name, **counts} for name, path in models.items()],
        }
    )
    async with mesh_of(topology) as mesh:
        yield mesh


@asynccontextmanager
async def mesh_of(topology: Topology) -> AsyncIterator[InProcessMesh]:
    """Start the services of a topology; leave = drained in order."""
    resolved = resolve(topology, Path)
    specs = plan(topology, resolved, Wiring("memory:", "", topology.store_url), ports.free_ports())
    space, spans = MemorySpace(), Spans()
    await place(topology, resolved, MemoryRegistry(space))
    mesh = InProcessMesh(specs, spans, space)
    stops: dict[str, asyncio.Event] = {one.name: asyncio.Event() for one in specs}
    ready: dict[str, asyncio.Future[Mesh]] = {one.name: asyncio.get_running_loop().create_future() for one in specs}
    async with asyncio.TaskGroup() as group:
        tasks = {
            one.name: group.create_task(_serve(one, mesh, stops[one.name], ready[one.name]), name=one.name)
            for one in specs
        }
        try:
            async with asyncio.timeout(30):
                for name, future in ready.items():
                    mesh.meshes[name] = await future
            async with MeshfireClient(mesh.address("router-0")) as client:
                mesh.client = client
                await _serves_all(client, topology)
                yield mesh
        finally:
            for service in STOP_ORDER:
                for one in specs:
                    if one.service == service:
                        stops[one.name].set()
                        await asyncio.wait([tasks[one.name]])


async def _serve(spec: ProcessSpec, mesh: InProcessMesh, stop: asyncio.Event, ready: asyncio.Future[Mesh]) -> None:
    build = import_module(f"services.{spec.service}.server").build
    telemetry = configure(spec.service, spec.name, exporter=mesh.spans)
    registry = MemoryRegistry(mesh.space)
    async with running(spec.service, build, settings_of(spec), registry=registry, telemetry=telemetry) as own:
        ready.set_result(own)
        await stop.wait()


async def _serves_all(client: MeshfireClient, topology: Topology) -> None:
    wanted = {one.served_name for one in topology.models}
    async with asyncio.timeout(30):
        while wanted - {one.name for one in await client.list_models()}:
            await asyncio.sleep(0.05)
