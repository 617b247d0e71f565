"""One held stream to one expert shard.

Owns connecting, the check that the shard is the one meant, sending, matching answers to hops, and reconnecting: hops
without an answer are sent again on the next stream, which is safe because Forward is pure. Opens the lane beside the
stream, and ends it with the stream. Does not know other shards or placements: who should rather be asked than a shard
that is away, its `LinkOwner` decides. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import grpc.aio

from meshfire.api.expert_shard.v1 import expert_shard_service_pb2 as pb
from meshfire.api.expert_shard.v1 import expert_shard_service_pb2_grpc as rpc
from meshfire.errors import MeshfireError, ModelMismatch, QueueFull, ShardUnavailable
from meshfire.rpc import streams
from meshfire.rpc.status import from_rpc_error
from meshfire.worker.hop import Hop
from meshfire.worker.hop_lane import HopLane
from meshfire.worker.hop_wire import request_of

log = logging.getLogger(__name__)

#: auto = a lane where the shard is on this machine, else gRPC; local = only shards with a lane; grpc = no lanes
HopTransport: TypeAlias = Literal["auto", "grpc", "local"]
ForwardCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.ForwardRequest, pb.ForwardResponse]"

CALLER_METADATA = "x-meshfire-caller"
DESCRIBE_TIMEOUT_S = 3.0
OPEN_TIMEOUT_S = 3.0
#: hops without an answer on one stream; a model thread has a few, so this many is a caller that never collects
MAX_WAITING_HOPS = 4096
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


class Channels(Protocol):
    """Where a channel to an address comes from; meshfire.rpc.channels.ChannelPool is one."""

    def get(self, address: str) -> grpc.aio.Channel:
        """A channel to `host:port`, shared with other callers."""


class LinkOwner(Protocol):
    """Who is told what happens on a link. Called on the event loop; must return at once."""

    def on_answer(self, hop: Hop, response: pb.ForwardResponse) -> None:
        """The shard's answer, good or bad."""

    def on_link_change(self) -> None:
        """A stream began or ended: `live` has changed."""


@dataclass(frozen=True)
class ShardIdentity:
    """What a shard must be to be this caller's."""

    model: str
    model_revision: str
    hidden_size: int


@dataclass(frozen=True)
class Caller:
    """Who asks, and how."""

    #: names its spans at the shards
    caller_id: str
    transport: HopTransport = "auto"


class ShardLink:
    """The way to one shard id. `run()` lives in the owner's TaskGroup."""

    def __init__(
        self, shard_id: str, identity: ShardIdentity, channels: Channels, owner: LinkOwner, caller: Caller
    ) -> None:
        self.shard_id = shard_id
        #: the faster way, if there is one; replaced, and read by the model thread
        self.lane: HopLane | None = None
        #: a checked stream is up
        self.live = False
        #: hops under way get no answer; set by the owner, cleared by the next answer
        self.stalled = False
        #: rows without an answer
        self.num_rows = 0
        #: why the shard is refused, while it is
        self.refusal: ModelMismatch | None = None
        #: placement epochs that the shard said it serves
        self.epochs: frozenset[int] = frozenset()
        self._identity = identity
        self._channels = channels
        self._owner = owner
        self._caller = caller
        self._local_socket = ""
        self._addresses: tuple[str, ...] = ()
        self._address = ""
        self._addressed = asyncio.Event()
        self._waiting: dict[int, Hop] = {}
        self._outbox: deque[pb.ForwardRequest] = deque()
        self._posted = asyncio.Event()
        self._call: ForwardCall | None = None
        self._quiet_since = time.monotonic()

    @property
    def quiet_s(self) -> float:
        """How long hops have been waiting on this stream without any answer; 0 while none waits."""
        return time.monotonic() - self._quiet_since if self._waiting and self.live else 0.0

    @property
    def left_behind(self) -> bool:
        """The stream goes to an address that discovery no longer names."""
        return self._address not in self._addresses

    @property
    def waiting(self) -> tuple[Hop, ...]:
        """Hops without an answer, oldest first."""
        return tuple(self._waiting.values())

    def offer(self, addresses: Sequence[str]) -> None:
        """Where discovery sees the shard now. An empty list keeps the last ones; a working stream is kept as well."""
        if addresses and tuple(addresses) != self._addresses:
            self._addresses = tuple(addresses)
            self._addressed.set()

    def submit(self, hop: Hop) -> None:
        """Send a hop now, or as soon as there is a stream. Raises QueueFull."""
        if len(self._waiting) >= MAX_WAITING_HOPS:
            raise QueueFull(f"{MAX_WAITING_HOPS} hops wait for shard {self.shard_id}")
        if not self._waiting:
            self._quiet_since = time.monotonic()
        self._waiting[hop.hop_id] = hop
        self.num_rows += hop.num_tokens
        if self.live:
            self._post(request_of(hop))

    def withdraw(self, hop: Hop) -> None:
        """Forget a hop; its answer, if one comes, is dropped."""
        if self._waiting.pop(hop.hop_id, None) is not None:
            self.num_rows -= hop.num_tokens

    def finish(self, traceparents: Sequence[str]) -> None:
        """Tell the shard that these traces end here. Without a stream, or on a stuck one, its own clock ends them."""
        if self.lane is not None:
            self.lane.finish(traceparents)
        if self.live and len(self._outbox) < MAX_WAITING_HOPS:
            self._post(pb.ForwardRequest(finished_traceparents=traceparents))

    def break_off(self) -> None:
        """Give up the stream and try the shard's next address."""
        if self._call is not None:
            self._call.cancel()

    async def describe(self) -> None:
        """Ask what the shard is and serves now. Raises ModelMismatch, or Unavailable and its like."""
        stub = rpc.ExpertShardServiceStub(self._channels.get(self._address))
        answer = await stub.DescribeShard(pb.DescribeShardRequest(), timeout=DESCRIBE_TIMEOUT_S)
        self._check(answer)
        self.epochs = frozenset(answer.placement_epochs)
        self._local_socket = answer.local_socket

    async def run(self) -> None:
        """Keep a stream; ends only by cancellation."""
        pause_s = _FIRST_PAUSE_S
        turn = 0
        while True:
            await self._addressed.wait()
            self._address = self._addresses[turn % len(self._addresses)]
            was_live = await self._hold_stream()
            pause_s = _FIRST_PAUSE_S if was_live else min(2 * pause_s, _LONGEST_PAUSE_S)
            turn += 1
            await self._pause(pause_s)

    async def _hold_stream(self) -> bool:
        """One stream from check to end; True if it was up."""
        was_live = False
        try:
            await self.describe()
            self.refusal = None
            await self._open()
            was_live = True
            await self._serve()
        except ModelMismatch as error:
            self.refusal = error
            log.error("shard %s at %s is refused: %s", self.shard_id, self._address, error)
        except MeshfireError as error:
            log.info("shard %s at %s: %s", self.shard_id, self._address, error)
        finally:
            self._close()
        return was_live

    async def _open(self) -> None:
        stub = rpc.ExpertShardServiceStub(self._channels.get(self._address))
        self._call = stub.Forward(None, metadata=((CALLER_METADATA, self._caller.caller_id),))
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self._call.wait_for_connection()  # the shard sends metadata at once
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except TimeoutError:
            raise ShardUnavailable(f"shard {self.shard_id} at {self._address} does not open a stream") from None
        self._open_lane()
        self.live, self.stalled, self._quiet_since = True, False, time.monotonic()
        self._outbox.clear()
        for hop in self._waiting.values():
            hop.fault = ""  # told once: a shard that comes back must be able to answer
            self._post(request_of(hop))
        way = "lane and stream" if self.lane is not None else "stream"
        log.info("shard %s: %s to %s, %d hops to send", self.shard_id, way, self._address, len(self._waiting))
        self._owner.on_link_change()

    def _open_lane(self) -> None:
        """Raises ShardUnavailable if there can be none and the transport must be local."""
        self.lane = None
        if self._caller.transport == "grpc":
            return
        try:
            self.lane = HopLane.open(self.shard_id, self._local_socket, self._caller.caller_id)
        except ShardUnavailable as error:
            if self._caller.transport == "local":
                raise ShardUnavailable(f"shard {self.shard_id} is not usable by hop_transport local: {error}") from None

    def _close(self) -> None:
        if self.lane is not None:
            self.lane.shut()
            self.lane = None
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self.live:
            self.live = False
            self._owner.on_link_change()

    async def _serve(self) -> None:
        """Both directions until the stream ends. Raises the error that ended it."""
        call = self._call
        assert call is not None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(call), name=f"hop-read {self.shard_id}")
                group.create_task(self._write(call), name=f"hop-write {self.shard_id}")
        except* MeshfireError as errors:
            raise _first(errors) from None

    async def _write(self, call: ForwardCall) -> None:
        while True:
            await self._posted.wait()
            self._posted.clear()
            while self._outbox:
                await streams.write(call, self._outbox.popleft())

    async def _read(self, call: ForwardCall) -> None:
        try:
            # grpc.aio raises CancelledError for a call that `break_off` cancelled; told apart from this task's own.
            while isinstance(response := await call.read(), pb.ForwardResponse):  # else EOF
                self._receive(response)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError:
            if not call.cancelled() or _being_cancelled():
                raise
        raise ShardUnavailable(f"the stream to shard {self.shard_id} ended")

    def _receive(self, response: pb.ForwardResponse) -> None:
        self.stalled, self._quiet_since = False, time.monotonic()
        if self.lane is not None and self.lane.broken:  # the shard is well: it answers here
            self._open_lane()
        hop = self._waiting.get(response.hop_id)
        if hop is not None:
            self.withdraw(hop)
            self._owner.on_answer(hop, response)

    def _post(self, request: pb.ForwardRequest) -> None:
        self._outbox.append(request)
        self._posted.set()

    def _check(self, answer: pb.DescribeShardResponse) -> None:
        if answer.shard_id != self.shard_id:  # another process took the address over
            raise ShardUnavailable(f"{self._address} is shard {answer.shard_id}, not {self.shard_id}")
        seen = ShardIdentity(answer.model, answer.model_revision, answer.hidden_size)
        if seen != self._identity:
            raise ModelMismatch(f"shard {self.shard_id} at {self._address} serves {seen}, expected {self._identity}")

    async def _pause(self, limit_s: float) -> None:
        """Back off, but not when discovery has just told a new address."""
        self._addressed.clear()
        try:
            async with asyncio.timeout(limit_s):
                await self._addressed.wait()
        except TimeoutError:
            self._addressed.set()


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _first(group: BaseExceptionGroup[MeshfireError]) -> MeshfireError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
