"""Hops of callers on this machine: from frame to frame without leaving the compute thread.

Owns each lane's caller and traces, and the choice which hop can be computed at once: one of an epoch that is not served
yet, or with a fault to rehearse, first waits on the event loop. Knows nothing of sockets' waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from meshfire.errors import InternalError, MeshfireError
from meshfire.rpc.lane_frame import Frame, Kind, split_text
from meshfire.rpc.lane_socket import LaneSocket
from services.expert_shard.compute_loop import ComputeLoop
from services.expert_shard.forwarder import Forwarder, cost_of_frame, frame_refusal
from services.expert_shard.instruments import ShardInstruments
from services.expert_shard.spans import SpanBook


@dataclass(eq=False)
class LaneDesk:
    """Implements `LaneHandler`; compute thread only, except for what says otherwise."""

    compute: ComputeLoop
    forwarder: Forwarder
    instruments: ShardInstruments
    #: caller id → a book for its traces
    new_book: Callable[[str], SpanBook]
    #: whether an epoch is served right now; any thread
    serves: Callable[[int], bool]
    #: on the event loop: rehearse a fault and wait for an epoch, or raise why not
    admit: Callable[[int, str], Awaitable[None]]
    #: where `admit` runs
    loop: asyncio.AbstractEventLoop
    tasks: asyncio.TaskGroup
    span_silence_s: float
    _books: dict[LaneSocket, SpanBook] = field(default_factory=dict, init=False)

    def on_frame(self, lane: LaneSocket, frame: Frame, arrived_ns: int) -> None:
        """LaneHandler. Anything out of order ends the lane: its caller has the stream."""
        if frame.kind is Kind.HELLO and lane not in self._books:
            self._books[lane] = self.new_book(frame.text.decode(errors="replace"))
        elif frame.kind is Kind.HOP and lane in self._books:
            traceparents, fault = split_text(frame.text)
            if fault or not self.serves(frame.epoch):
                self.loop.call_soon_threadsafe(self._set_aside, lane, frame, fault, arrived_ns)
            else:
                self._answer(lane, frame, traceparents, arrived_ns)
        elif frame.kind is Kind.FINISH and lane in self._books:
            self._books[lane].finish(split_text(frame.text)[0])
        else:
            lane.shut()

    def on_close(self, lane: LaneSocket) -> None:
        """LaneHandler."""
        book = self._books.pop(lane, None)
        if book is not None:
            book.close()

    def on_tick(self) -> None:
        """LaneHandler."""
        for book in self._books.values():
            book.sweep(self.span_silence_s)

    def _answer(self, lane: LaneSocket, frame: Frame, traceparents: list[str], arrived_ns: int) -> None:
        self._send(lane, frame, traceparents, self.forwarder.answer_frame(frame, arrived_ns))

    def _send(self, lane: LaneSocket, frame: Frame, traceparents: list[str], answer: Frame) -> None:
        """The answer first: the caller waits for it, not for the books."""
        self.compute.send(lane, answer)
        cost = cost_of_frame(frame, answer)
        self.instruments.record(cost)
        book = self._books.get(lane)
        if book is not None:
            book.record(traceparents, cost)
        frame.release()

    # --- event loop ---------------------------------------------------------------------------------------------------

    def _set_aside(self, lane: LaneSocket, frame: Frame, fault: str, arrived_ns: int) -> None:
        self.tasks.create_task(self._wait_and_answer(lane, frame, fault, arrived_ns), name="expert-lane-hop")

    async def _wait_and_answer(self, lane: LaneSocket, frame: Frame, fault: str, arrived_ns: int) -> None:
        traceparents = split_text(frame.text)[0]
        try:
            await self.admit(frame.epoch, fault)
        except Exception as error:
            known = error if isinstance(error, MeshfireError) else InternalError("internal error")
            refused = frame_refusal(frame, known)
            self.compute.post(lambda: self._send(lane, frame, traceparents, refused))
        else:
            self.compute.post(lambda: self._answer(lane, frame, traceparents, arrived_ns))
