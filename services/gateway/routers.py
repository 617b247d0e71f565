"""The routers that discovery names, used in turn. Owns choosing one and trying the next; knows no HTTP and no dialect.

A call moves on to another router only when this one is unavailable *and* nothing of the answer has been seen:
afterwards a second attempt could say different words.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Protocol, TypeVar

import grpc.aio

from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.api.router.v1 import inference_service_pb2_grpc as rpc
from meshfire.discovery.base import Registry
from meshfire.errors import DeadlineExceeded, Unavailable

log = logging.getLogger(__name__)

ROUTER_SERVICE = "meshfire-router"

Metadata = Sequence[tuple[str, str]]
T = TypeVar("T")


class Channels(Protocol):
    """Where a channel to an address comes from; meshfire.rpc.channels.ChannelPool is one."""

    def get(self, address: str) -> grpc.aio.Channel:
        """A channel to `host:port` whose calls raise MeshfireErrors."""


class Routers:
    """`watch()` lives in the process's task group; the rest is called on the same loop."""

    def __init__(self, registry: Registry, channels: Channels) -> None:
        self._registry = registry
        self._channels = channels
        self._addresses: tuple[str, ...] = ()
        self._turn = itertools.count()

    async def watch(self) -> None:
        """Follow discovery until cancelled."""
        async for instances in self._registry.watch(ROUTER_SERVICE):
            self._addresses = tuple(instance.address for instance in instances)
            log.info("routers: %s", ", ".join(self._addresses) or "none")

    @property
    def num_known(self) -> int:
        """Routers that discovery names now."""
        return len(self._addresses)

    async def generate(
        self, request: pb.GenerateRequest, metadata: Metadata, timeout_s: float
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """One output. Leaving the iteration (close it!) cancels the call at the router.

        Raises what the router raised; Unavailable if no router can be reached."""
        deadline = _now() + timeout_s
        candidates = self._in_turn()
        for address in candidates:
            seen = False
            try:
                async with aclosing(self._generate_at(address, request, metadata, deadline)) as responses:
                    async for response in responses:
                        seen = True
                        yield response
                return
            except Unavailable as error:
                if seen or address == candidates[-1]:
                    raise
                log.warning("router %s is unavailable, trying the next: %s", address, error)

    async def list_models(self, timeout_s: float) -> list[pb.Model]:
        """Models that are served now. Raises Unavailable or DeadlineExceeded if no router answers in time."""

        deadline = _now() + timeout_s
        candidates = self._in_turn()
        for address in candidates:
            try:
                response = await self._stub(address).ListModels(pb.ListModelsRequest(), timeout=_remaining_s(deadline))
                return list(response.models)
            except Unavailable:
                if address == candidates[-1]:
                    raise
        raise AssertionError("unreachable: the last candidate returns or raises")

    async def at_any(
        self, ask: Callable[[grpc.aio.Channel, float], Awaitable[T]], deadline: float, *, tries: int | None = None
    ) -> T:
        """One call at a router, and at the next one while it is unavailable, `tries` routers at most (None = all).
        `ask` gets a channel and the seconds left. Raises what the last router raised."""
        candidates = self._in_turn()[:tries]
        for address in candidates:
            try:
                return await ask(self._channels.get(address), _remaining_s(deadline))
            except Unavailable as error:
                if address == candidates[-1]:
                    raise
                log.warning("router %s is unavailable, trying the next: %s", address, error)
        raise AssertionError("unreachable: the last candidate returns or raises")

    async def _generate_at(
        self, address: str, request: pb.GenerateRequest, metadata: Metadata, deadline: float
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        call = self._stub(address).Generate(request, metadata=tuple(metadata), timeout=_remaining_s(deadline))
        finished = False
        try:
            async for response in call:
                finished = response.HasField("finished")
                yield response
        except asyncio.CancelledError:
            if _cancelled_from_here():
                raise
            # grpc.aio raises this too when the channel is closed under a call; nobody asked *this* task to stop.
            raise Unavailable("the channel to the router was closed") from None
        finally:
            call.cancel()
        if not finished:
            raise Unavailable("the router ended the call without a last message")

    def _stub(self, address: str) -> rpc.InferenceServiceAsyncStub:
        return rpc.InferenceServiceStub(self._channels.get(address))

    def _in_turn(self) -> tuple[str, ...]:
        """All routers, each call beginning with another one."""
        addresses = self._addresses
        if not addresses:
            raise Unavailable("no router is known to discovery")
        start = next(self._turn) % len(addresses)
        return addresses[start:] + addresses[:start]


def _now() -> float:
    return asyncio.get_running_loop().time()


def _remaining_s(deadline: float) -> float:
    remaining_s = deadline - _now()
    if remaining_s <= 0:
        raise DeadlineExceeded("the request's time is over")
    return remaining_s


def _cancelled_from_here() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
