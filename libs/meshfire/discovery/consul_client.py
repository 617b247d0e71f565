"""The agent's answers as Meshfire's values: the few calls of Consul's HTTP API that discovery needs, through py-consul.

Owns the connection and the mapping of errors: what means "the agent cannot answer now" becomes Unavailable, what the
agent calls wrong becomes BadInput. Knows no loop, no retry and no last-known-good.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import aiohttp
import consul
import grpc
from consul.callback import CB
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshfire.discovery.base import Instance, KvEntry
from meshfire.discovery.consul_transport import AgentApi
from meshfire.errors import BadInput, Unavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

CALL_TIMEOUT_S = 3.0
CHECK_INTERVAL = "1s"
CHECK_TIMEOUT = "5s"
"""A worker that computes on all cores may be slow to answer; a killed one refuses the connection at once."""
FAILURES_BEFORE_CRITICAL = 2
FORGET_CRITICAL_AFTER = "1m"  # the smallest that Consul accepts


@dataclass(frozen=True)
class Answer(Generic[T]):
    """A read and the index to block on next."""

    index: int
    value: T


class ConsulClient:
    """One agent. Usable on one event loop; connects at the first call."""

    def __init__(self, host: str, port: int) -> None:
        self.address = f"{host}:{port}"
        self._host = host
        self._port = port
        self._opened: AgentApi | None = None

    async def register(self, instance: Instance) -> None:
        """Announce with a gRPC health check, passing from the start only if the server answers so just now."""
        host, _, port = instance.address.rpartition(":")
        check: dict[str, Any] = consul.Check.grpc(
            instance.address, CHECK_INTERVAL, timeout=CHECK_TIMEOUT, deregister=FORGET_CRITICAL_AFTER
        )
        check["FailuresBeforeCritical"] = FAILURES_BEFORE_CRITICAL
        check["Status"] = "passing" if await is_serving(instance.address) else "critical"
        await self._call(
            self._agent.agent.service.register(
                instance.service,
                service_id=instance.instance_id,
                address=host.strip("[]"),
                port=int(port),
                meta=dict(instance.metadata),
                check=check,
            )
        )

    async def deregister(self, instance_id: str) -> None:
        await self._call(self._agent.agent.service.deregister(instance_id))

    async def knows(self, instance_id: str) -> bool:
        """Whether the agent still holds this registration; a restarted one does not."""
        return await self._call(self._agent.agent.service_definition(instance_id)) is not None

    async def instances(self, service: str, index: int, wait_s: float) -> Answer[tuple[Instance, ...]]:
        """The passing ones. Blocks while nothing newer than `index` is there, up to about `wait_s`; 0 = at once."""
        answer = await self._read(f"/v1/health/service/{service}", {"passing": "1"}, index, wait_s)
        return Answer(answer.index, tuple(_instance_from(entry) for entry in answer.value or ()))

    async def document(self, key: str, index: int, wait_s: float) -> Answer[KvEntry | None]:
        """As `instances`, for one document."""
        answer = await self._read(f"/v1/kv/{key}", {}, index, wait_s)
        return Answer(answer.index, _entry_from(answer.value))

    async def get(self, key: str) -> KvEntry | None:
        """Read through the leader: a compare-and-set that follows must not start from a stale version."""
        _, found = await self._call(self._agent.kv.get(key, connections_timeout=CALL_TIMEOUT_S))
        return _entry_from([found] if found else None)

    async def put(self, key: str, value: bytes, expected_index: int | None) -> bool:
        written = await self._call(
            self._agent.kv.put(key, value, cas=expected_index, connections_timeout=CALL_TIMEOUT_S)
        )
        return bool(written)

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    @property
    def _agent(self) -> AgentApi:
        if self._opened is None:  # aiohttp wants a running loop, so not in the constructor
            self._opened = AgentApi(self._host, self._port)
        return self._opened

    async def _read(self, path: str, flags: Mapping[str, str], index: int, wait_s: float) -> Answer[Any]:
        # Through py-consul's transport rather than `health.service`: that has no `stale`, which is what keeps watches
        # alive through an election, and no timeout of its own for the call.
        asked = [*flags.items(), ("stale", "1")]
        if index:
            asked += [("index", str(index)), ("wait", f"{max(1, int(wait_s * 1000))}ms")]
        timeout_s = CALL_TIMEOUT_S + (wait_s * 17 / 16 if index else 0)  # the agent adds up to a sixteenth
        decode = "Value" if path.startswith("/v1/kv/") else False
        request = self._agent.http.get(
            CB.json(index=True, decode=decode),
            path,
            asked,
            headers=self._agent.prepare_headers(),
            connections_timeout=timeout_s,
        )
        found_index, value = await self._call(request, timeout_s)
        return Answer(int(found_index), value)

    async def _call(self, request: Awaitable[Any], timeout_s: float = CALL_TIMEOUT_S) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await request
        except (consul.exceptions.BadRequest, consul.exceptions.ClientError) as error:
            raise BadInput(f"the Consul agent at {self.address} refused the call: {error}") from error
        except (consul.ConsulException, aiohttp.ClientError, TimeoutError, OSError) as error:
            what = str(error) or type(error).__name__
            raise Unavailable(f"the Consul agent at {self.address} does not answer: {what}") from error


async def is_serving(address: str, timeout_s: float = 1.0) -> bool:
    """Whether the gRPC server there says SERVING for itself as a whole."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            log.debug("%s answers no health check: %s", address, error.code())
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _instance_from(entry: Mapping[str, Any]) -> Instance:
    service = entry["Service"]
    host = service["Address"] or entry["Node"]["Address"]
    host = f"[{host}]" if ":" in host else host
    return Instance(service["Service"], service["ID"], f"{host}:{service['Port']}", dict(service["Meta"] or {}))


def _entry_from(found: list[Mapping[str, Any]] | None) -> KvEntry | None:
    if not found:
        return None
    return KvEntry(found[0]["Value"] or b"", int(found[0]["ModifyIndex"]))
