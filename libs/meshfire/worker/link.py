"""A worker's side of WorkService: one held stream to every router that discovery names.

Owns connecting, hello, credits, reconnecting and the hand-over of the router's messages. Knows nothing of what a lease
asks for, of KV or of models: that is the `LeaseHandler`'s.

A stream outlives discovery: a router that drops out of the registry while its stream works is kept (flapping health
must not cost requests); only reconnecting needs the registry to name it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from typing import Protocol, TypeAlias

import grpc.aio

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.api.router.v1 import work_service_pb2_grpc as rpc
from meshfire.discovery.base import Registry
from meshfire.errors import InternalError, MeshfireError, Refused, Unavailable
from meshfire.kv.journal import BlockJournal
from meshfire.rpc.status import from_rpc_error
from meshfire.worker import kv_events
from meshfire.worker.outbox import Outbox

_log = logging.getLogger(__name__)

WorkCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.WorkRequest, pb.WorkResponse]"

ROUTER_SERVICE = "meshfire-router"

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


class Channels(Protocol):
    """Where a channel to an address comes from; meshfire.rpc.channels.ChannelPool is one."""

    def get(self, address: str) -> grpc.aio.Channel:
        """A channel to `host:port`, shared with other callers."""


class LeaseHandler(Protocol):
    """What a worker does with the routers' messages. Called on the event loop; must return at once."""

    def on_lease(self, router_id: str, lease: pb.Lease) -> None:
        """New work. A MeshfireError raised here is answered to the router as LeaseFailed."""

    def on_cancel(self, router_id: str, request_id: str, epoch: int) -> None:
        """Stop work on a request of this epoch or an older one. Unknown requests are no error."""

    def on_kv_grant(self, router_id: str, grant: pb.KvGrant) -> None:
        """A reader for an offered KV."""

    def on_router_lost(self, router_id: str) -> None:
        """The stream ended: nobody waits for the work of this router's leases any more."""


class WorkerLink:
    """Holds the streams. `run()` lives in the worker's TaskGroup; everything else is called on the same loop.

    Example::

        link = WorkerLink(hello, handler, mesh.registry, mesh.channels)
        mesh.tasks.create_task(link.run(), name="worker-link")
        link.set_credit(num_slots=4, num_free_blocks=1024)
        await link.connected.wait()
    """

    def __init__(
        self,
        hello: pb.WorkerHello,
        handler: LeaseHandler,
        registry: Registry,
        channels: Channels,
        *,
        journal: BlockJournal | None = None,
        max_queued_messages: int = 1024,
        welcome_timeout_s: float = 10.0,
    ) -> None:
        self._hello = hello
        self._handler = handler
        self._registry = registry
        self._channels = channels
        self._journal = journal
        self._max_queued_messages = max_queued_messages
        self._welcome_timeout_s = welcome_timeout_s
        self._wanted: frozenset[str] = frozenset()
        self._visitors: dict[str, asyncio.Task[None]] = {}
        self._streams: dict[str, _RouterStream] = {}
        self._room = (0, 0, 0)
        #: set while at least one router has welcomed this worker
        self.connected = asyncio.Event()

    def send(self, router_id: str, message: pb.WorkRequest) -> None:
        """Queue a message to one router; never waits. Dropped if that router's stream is gone: its leases are, too."""
        stream = self._streams.get(router_id)
        if stream is None:
            _log.debug("dropped a message to router %s: no stream", router_id)
        else:
            stream.post(message)

    def set_credit(self, num_slots: int, num_free_blocks: int, num_pending_tokens: int = 0) -> None:
        """Tell all routers how many more leases the worker would take now, its free KV blocks, what it has still to
        compute, and what changed in its prefix cache."""
        self._room = (num_slots, num_free_blocks, num_pending_tokens)
        events = [] if self._journal is None else kv_events.changes(self._journal.drain())
        for stream in self._streams.values():
            for message in events:
                stream.post(message)
            stream.credit(*self._room)

    async def run(self) -> None:
        """Keep one stream to every router; returns only by cancellation."""
        async with asyncio.TaskGroup() as group:
            async for instances in self._registry.watch(ROUTER_SERVICE):
                # By address: a router restarted on its port is the same place, whatever it calls itself now.
                self._wanted = frozenset(instance.address for instance in instances)
                for address in self._wanted - self._visitors.keys():
                    task = group.create_task(self._visit(address), name=f"router-stream {address}")
                    self._visitors[address] = task

    async def _visit(self, address: str) -> None:
        """Connect and reconnect for as long as the registry names the address."""
        failures = 0
        try:
            while address in self._wanted:
                welcomed = await self._hold_stream(address)
                failures = 0 if welcomed else failures + 1
                await asyncio.sleep(_pause_s(failures))
        finally:
            del self._visitors[address]

    async def _hold_stream(self, address: str) -> bool:
        """Hold one stream until it ends; True if the router had welcomed the worker."""
        outbox = Outbox(self._hello, max_messages=self._max_queued_messages)
        call = rpc.WorkServiceStub(self._channels.get(address)).Work(outbox.requests())
        stream = _RouterStream(outbox, call)
        try:
            await self._serve(stream, call)
        except grpc.aio.AioRpcError as error:
            _report(address, from_rpc_error(error))
        except MeshfireError as error:
            _report(address, error)
        except asyncio.CancelledError:
            # gRPC reports a call that this side cancelled (overflow) in the same way as the task's own cancellation.
            if not stream.overflowed or _being_cancelled():
                raise
            _log.warning("router at %s does not read: stream dropped", address)
        finally:
            call.cancel()
            self._forget(stream)
        return stream.router_id is not None

    async def _serve(
        self, stream: _RouterStream, call: grpc.aio.StreamStreamCall[pb.WorkRequest, pb.WorkResponse]
    ) -> None:
        messages: AsyncIterator[pb.WorkResponse] = aiter(call)
        try:
            async with asyncio.timeout(self._welcome_timeout_s):
                first = await anext(messages, None)
        except TimeoutError:
            raise Unavailable(f"no welcome within {self._welcome_timeout_s} s") from None
        if first is None or first.WhichOneof("message") != "welcome":
            raise Refused("the router's first message was not a welcome")
        self._remember(stream, first.welcome.router_id)
        async for message in messages:
            self._take(stream, first.welcome.router_id, message)

    def _remember(self, stream: _RouterStream, router_id: str) -> None:
        stream.router_id = router_id
        self._streams[router_id] = stream
        if self._journal is not None:
            for message in kv_events.everything(self._journal.shared()):
                stream.post(message)
        stream.credit(*self._room)
        self.connected.set()
        _log.info("welcomed by router %s", router_id)

    def _forget(self, stream: _RouterStream) -> None:
        router_id = stream.router_id
        if router_id is None or self._streams.get(router_id) is not stream:
            return
        del self._streams[router_id]
        if not self._streams:
            self.connected.clear()
        self._handler.on_router_lost(router_id)

    def _take(self, stream: _RouterStream, router_id: str, message: pb.WorkResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "lease":
            stream.num_leases_seen += 1
            self._take_lease(stream, router_id, message.lease)
        elif kind == "cancel":
            self._handler.on_cancel(router_id, message.cancel.request_id, message.cancel.epoch)
        elif kind == "kv_grant":
            self._handler.on_kv_grant(router_id, message.kv_grant)
        else:
            _log.warning("router %s said %s, which this worker does not know", router_id, kind)

    def _take_lease(self, stream: _RouterStream, router_id: str, lease: pb.Lease) -> None:
        try:
            self._handler.on_lease(router_id, lease)
            return
        except MeshfireError as error:
            refusal = error
        except Exception:
            _log.exception("lease %s epoch %d", lease.request_id, lease.epoch)
            refusal = InternalError("the worker could not take the lease")
        stream.post(pb.WorkRequest(failed=failure_of(lease.request_id, lease.epoch, refusal)))


def failure_of(request_id: str, epoch: int, error: MeshfireError) -> pb.LeaseFailed:
    """An error as the router wants to hear it."""
    metadata = dict(error.metadata)
    if error.field is not None:
        metadata.setdefault("field", error.field)
    return pb.LeaseFailed(
        request_id=request_id,
        epoch=epoch,
        reason=error.reason,
        message=error.message,
        retryable=error.retryable,
        metadata=metadata,
    )


class _RouterStream:
    """One stream that is up: what goes out, what came in."""

    def __init__(self, outbox: Outbox, call: WorkCall) -> None:
        self._outbox = outbox
        self._call = call
        self.router_id: str | None = None
        self.num_leases_seen = 0
        self.overflowed = False

    def post(self, message: pb.WorkRequest) -> None:
        # A message lost in the middle would leave a hole in an output: better no stream than such a one.
        if not self.overflowed and not self._outbox.post(message):
            self.overflowed = True
            self._call.cancel()

    def credit(self, num_slots: int, num_free_blocks: int, num_pending_tokens: int) -> None:
        self._outbox.credit(num_slots, num_free_blocks, self.num_leases_seen, num_pending_tokens)


def _pause_s(failures: int) -> float:
    """Exponential backoff with full jitter, so that a restarted router is not met by all workers at once."""
    return random.uniform(0.0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(failures, 16)))


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _report(address: str, error: MeshfireError) -> None:
    level = logging.INFO if isinstance(error, Unavailable) else logging.WARNING
    _log.log(level, "stream to router at %s ended: %s", address, error)
