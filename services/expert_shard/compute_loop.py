"""The loop of the thread that computes: it reads lanes itself, and takes calls from the event loop in between.

Owns waiting: for callers' frames, for room in their sockets, for calls. A caller that reads nothing, or has sent half a
frame, holds nobody up; ready lanes take turns, frame by frame. Knows neither hops nor weights.
"""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import ParamSpec, Protocol, TypeVar

from meshfire.rpc import lane_socket
from meshfire.rpc.lane_frame import Frame
from meshfire.rpc.lane_socket import LaneSocket

P = ParamSpec("P")
R = TypeVar("R")

_TICK_S = 0.5


class LaneHandler(Protocol):
    """What is done with frames. Called on the compute thread only."""

    def on_frame(self, lane: LaneSocket, frame: Frame, arrived_ns: int) -> None:
        """A frame, which came at `arrived_ns` (time.perf_counter_ns())."""

    def on_close(self, lane: LaneSocket) -> None:
        """The lane is gone; nothing can be sent."""

    def on_tick(self) -> None:
        """Every half second or so."""


class ComputeLoop:
    """`serve` is the thread; everything else may be called from any other."""

    def __init__(self, listener: socket.socket | None = None) -> None:
        self._listener = listener
        self._calls: deque[Callable[[], None]] = deque()
        self._alarm, self._bell = socket.socketpair()
        self._alarm.setblocking(False)
        self._bell.setblocking(False)
        self._lanes: dict[int, LaneSocket] = {}
        self._poll = select.poll()
        self._stopping = False
        #: time.perf_counter_ns() at which the last frame or call was done with
        self._busy_until_ns = 0

    async def run(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `fn` on the thread. A cancelled caller does not interrupt it: the result is dropped."""
        future: Future[R] = Future()
        self.post(lambda: _fulfil(future, lambda: fn(*args, **kwargs)))
        return await asyncio.wrap_future(future)

    def post(self, call: Callable[[], None]) -> None:
        """Have the thread call `call`, which must not raise."""
        self._calls.append(call)
        self._wake()

    def stop(self) -> None:
        """Let `serve` return, after what has been posted."""
        self._stopping = True
        self._wake()

    def serve(self, handler: LaneHandler) -> None:
        """Until `stop`. Callers that are connected then see the lane end."""
        self._poll.register(self._alarm, select.POLLIN)
        if self._listener is not None:
            self._poll.register(self._listener, select.POLLIN)
        next_tick = time.monotonic() + _TICK_S
        try:
            while not self._stopping:
                for number, _ in self._poll.poll(_TICK_S * 1000):
                    self._turn(number, handler)
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + _TICK_S
                    handler.on_tick()
        finally:
            self._take_calls()
            self.close_lanes(handler)
            self._alarm.close()
            self._bell.close()

    def close_lanes(self, handler: LaneHandler) -> None:
        """Take no callers any more and end the lanes of those who are here. Compute thread only."""
        if self._listener is not None:
            self._forget(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for lane in tuple(self._lanes.values()):
            lane.shut()
            self._close(lane, handler)

    def send(self, lane: LaneSocket, frame: Frame) -> None:
        """Send, and wait for room if there is none. Compute thread only."""
        lane.send(frame)
        if lane.is_choked and lane.fileno() in self._lanes:
            self._poll.modify(lane, select.POLLOUT)

    def _turn(self, number: int, handler: LaneHandler) -> None:
        """What one ready file asks for."""
        if number == self._alarm.fileno():
            self._take_calls()
        elif self._listener is not None and number == self._listener.fileno():
            self._accept()
        elif number in self._lanes:
            self._serve_lane(self._lanes[number], handler)
        self._busy_until_ns = time.perf_counter_ns()

    def _serve_lane(self, lane: LaneSocket, handler: LaneHandler) -> None:
        now_ns = time.perf_counter_ns()
        was_choked = lane.is_choked
        if was_choked:
            lane.flush()
        else:
            frame = lane.receive()
            if frame is not None:
                handler.on_frame(lane, frame, self._arrival_ns(frame, now_ns))
        if lane.broken:
            self._close(lane, handler)
        elif lane.is_choked != was_choked:  # who does not read is not read from
            self._poll.modify(lane, select.POLLOUT if lane.is_choked else select.POLLIN)

    def _arrival_ns(self, frame: Frame, now_ns: int) -> int:
        """A frame that was sent while the thread was busy has waited since; any other has just come."""
        return frame.sent_ns if 0 < frame.sent_ns < self._busy_until_ns else now_ns

    def _accept(self) -> None:
        assert self._listener is not None
        lane = lane_socket.accept(self._listener)
        if lane is not None:
            self._lanes[lane.fileno()] = lane
            self._poll.register(lane, select.POLLIN)

    def _close(self, lane: LaneSocket, handler: LaneHandler) -> None:
        self._forget(lane.fileno())
        del self._lanes[lane.fileno()]
        handler.on_close(lane)

    def _forget(self, number: int) -> None:
        with suppress(KeyError):  # never registered: `serve` did not begin
            self._poll.unregister(number)

    def _take_calls(self) -> None:
        with suppress(BlockingIOError):
            self._alarm.recv(4096)
        while self._calls:
            self._calls.popleft()()

    def _wake(self) -> None:
        with suppress(OSError):  # full: it is awake; or closed: nobody is there to wake
            self._bell.send(b"!")


def _fulfil(future: Future[R], compute: Callable[[], R]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(compute())
    except BaseException as error:  # it belongs to who asked
        future.set_exception(error)
