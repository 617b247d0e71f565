"""The composition root of a gateway: the one place that knows concrete classes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from meshfire.runtime.serve import Mesh, Service
from services.gateway.access.opening import door_for, store_of
from services.gateway.app import create_app
from services.gateway.config import GatewaySettings
from services.gateway.http_server import HttpServer, address_of, bind
from services.gateway.routers import Routers


@asynccontextmanager
async def build(settings: GatewaySettings, mesh: Mesh) -> AsyncIterator[Service]:
    """Follow the routers and serve HTTP. Without a router it starts too: /healthz then says what is missing."""
    routers = Routers(mesh.registry, mesh.channels)
    mesh.tasks.create_task(routers.watch(), name="gateway.routers")
    async with store_of(settings) as database:
        door = door_for(settings, database)
        listener = bind(settings.http_host, settings.http_port)
        address = address_of(listener)
        http = HttpServer(create_app(settings, routers, door, database, mesh.telemetry), listener)
        mesh.tasks.create_task(http.run_on_socket(), name="gateway.http")
        await http.ready()
        yield Service(_no_servicer, (), {"http_address": address}, http.drain)


def _no_servicer(server: grpc.aio.Server) -> None:
    """The gateway's gRPC server has health and reflection only."""
