"""Asks a process for its health (grpc.health.v1)."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshfire.errors import MeshfireError

SERVING = health_pb2.HealthCheckResponse.SERVING


async def is_serving(channel: grpc.aio.Channel, *, timeout_s: float = 2.0) -> bool:
    """True if the whole process says SERVING in time. `channel` is of a `ChannelPool`."""
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except MeshfireError:
        return False
    return bool(answer.status == SERVING)
