"""A gateway in this process, as the runtime starts it, before one fake router. Shared by a module's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshfire.discovery.base import Instance
from meshfire.discovery.memory import MemoryRegistry, MemorySpace
from meshfire.runtime.serve import running
from meshfire.telemetry.setup import Telemetry, configure
from services.gateway.config import GatewaySettings
from services.gateway.server import build
from tests.unit.gateway.fake_router import FakeRouter, serve


@dataclass
class Gateway:
    url: str
    router: FakeRouter
    space: MemorySpace
    spans: InMemorySpanExporter
    telemetry: Telemetry
    client: httpx.AsyncClient

    async def post(self, path: str, body: object, **more: object) -> httpx.Response:
        return await self.client.post(path, json=body, **more)  # type: ignore[arg-type]


def settings(**more: object) -> GatewaySettings:
    small: dict[str, object] = {"http_port": 0, "discovery_lag_s": 0, "drain_s": 5, "max_body_bytes": 200_000}
    return GatewaySettings(**(small | more))  # type: ignore[arg-type]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started_gateway() -> AsyncIterator[Gateway]:
    router = FakeRouter()
    server, address = await serve(router)
    space, spans = MemorySpace(), InMemorySpanExporter()
    space.put_instance(Instance("meshfire-router", "router-0", address))
    telemetry = configure("gateway", "gateway-0", exporter=spans)
    async with running("gateway", build, settings(), registry=MemoryRegistry(space), telemetry=telemetry):
        (instance,) = space.instances_of("meshfire-gateway")
        url = f"http://{instance.metadata['http_address']}"
        async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
            yield Gateway(url, router, space, spans, telemetry, client)
    await server.stop(None)


@pytest.fixture
def gateway(started_gateway: Gateway) -> Gateway:
    started_gateway.router.reset()
    started_gateway.telemetry.flush()
    started_gateway.spans.clear()
    return started_gateway
