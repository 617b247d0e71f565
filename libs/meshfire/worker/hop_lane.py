"""A lane to one shard on this machine, beside the held stream (ADR 11).

Owns sending hops from the model thread, reading their answers on it, and noticing that the lane is silent or lost. It
mends nothing: a hop that a lane does not answer goes to the event loop, which has the stream and the replicas.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterable, Sequence

from meshfire.rpc.lane_frame import Frame, Kind, join_text
from meshfire.rpc.lane_socket import LaneSocket, connect
from meshfire.worker.hop import Hop
from meshfire.worker.hop_wire import frame_of


class HopLane:
    """Model thread, except for `finish` and `shut`."""

    def __init__(self, shard_id: str, socket: LaneSocket) -> None:
        self.shard_id = shard_id
        #: rows without an answer
        self.num_rows = 0
        self.socket = socket
        self._waiting: dict[int, Hop] = {}
        self._reading = threading.Lock()
        self._quiet_since = time.monotonic()

    @classmethod
    def open(cls, shard_id: str, name: str, caller_id: str) -> HopLane:
        """The lane to the shard that listens under `name`. Raises ShardUnavailable."""
        socket = connect(name)
        socket.send(Frame(Kind.HELLO, text=caller_id.encode()))
        return cls(shard_id, socket)

    @property
    def broken(self) -> bool:
        """It carries nothing any more."""
        return self.socket.broken

    @property
    def quiet_s(self) -> float:
        """How long hops have been waiting without any answer; 0 while none waits."""
        return time.monotonic() - self._quiet_since if self._waiting else 0.0

    def send(self, hop: Hop) -> None:
        """Send a hop. On a broken lane it never gets an answer."""
        if not self._waiting:
            self._quiet_since = time.monotonic()
        self._waiting[hop.hop_id] = hop
        self.num_rows += hop.num_tokens
        self.socket.send(frame_of(hop))

    def drop(self, hop: Hop) -> None:
        """Forget a hop; its answer, if one comes, is dropped."""
        if self._waiting.pop(hop.hop_id, None) is not None:
            self.num_rows -= hop.num_tokens

    def read(self, *, waited: bool) -> None:
        """Take an answer, if one is there. `waited`: the thread slept until now, so it has just come."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            frame = self.socket.receive()
            if frame is not None:
                self._take(frame, time.perf_counter_ns(), waited)
        finally:
            self._reading.release()

    def finish(self, traceparents: Sequence[str]) -> None:
        """Tell the shard that these traces end here. Any thread."""
        self.socket.send(Frame(Kind.FINISH, text=join_text(traceparents)))

    def shut(self) -> None:
        """End it; who waits on it notices at once. Any thread."""
        self.socket.shut()

    def _take(self, frame: Frame, now_ns: int, waited: bool) -> None:
        if frame.kind not in (Kind.OUTPUT, Kind.ERROR):
            self.shut()
            return
        self._quiet_since = time.monotonic()
        hop = self._waiting.get(frame.hop_id)
        if hop is None:
            return
        self.drop(hop)
        # An answer that was there first has cost no wait since it came: one clock serves the machine.
        came_ns = now_ns if waited else min(max(frame.sent_ns, hop.started_ns), now_ns)
        hop.wait_ns = came_ns - hop.started_ns
        hop.answer = frame


def ready(lanes: Iterable[HopLane], limit_s: float) -> list[HopLane]:
    """Sleep until lanes have something to read or have ended, at most `limit_s`; which they are."""
    poll = select.poll()
    by_number = {}
    for lane in lanes:
        number = lane.socket.fileno()
        by_number[number] = lane
        poll.register(number, select.POLLIN | select.POLLOUT if lane.socket.is_choked else select.POLLIN)
    found = []
    for number, event in poll.poll(limit_s * 1000):
        if event & select.POLLOUT:
            by_number[number].socket.flush()
        if event & ~select.POLLOUT:
            found.append(by_number[number])
    return found
