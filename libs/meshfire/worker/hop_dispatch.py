"""A dispatch under way, as the model thread holds it: hops on lanes, hops in the care of the event loop, one sum.

Owns waiting for both kinds and the passage from the first to the second: whatever a lane does not answer well, the
event loop takes on. Knows nothing of placements or retries.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from meshfire.dispatch.combine import combine
from meshfire.errors import MeshfireError, StaleEpoch
from meshfire.rpc.lane_frame import Frame
from meshfire.worker.hop import Hop, HopStats, PendingHops, Step
from meshfire.worker.hop_lane import HopLane, ready
from meshfire.worker.hop_wire import count, error_in, partial_of

#: longest sleep without a look around: another thread may have read what this one waits for
_LOOK_S = 0.25


class Carer(Protocol):
    """Who takes on what lanes do not answer; meshfire.worker.hop_flow.HopFlow is one. Any thread."""

    stall_s: float

    def take_on(self, step: Step, hops: Sequence[Hop], *, refused: bool = False) -> PendingHops:
        """See to hops over streams and replicas; `refused`: the shard has said that it cannot for now."""

    def silent(self, lane: HopLane) -> None:
        """Its shard answers nothing: count it as frozen."""

    def late(self, owing: Sequence[str], layer: int) -> MeshfireError:
        """The deadline's error, which names the shards that still owe an answer."""

    def abandon(self, pending: PendingHops) -> None:
        """Nobody waits for these any more."""


@dataclass(eq=False)
class Dispatch:
    """Implements `PendingExperts`. One thread dispatches and collects."""

    step: Step
    stats: MutableMapping[str, HopStats]
    carer: Carer
    near: list[tuple[HopLane, Hop]] = field(default_factory=list)
    far: list[PendingHops] = field(default_factory=list)
    _answered: list[Hop] = field(default_factory=list)

    def result(self) -> Tensor:
        """Wait for all hops and add them up: [T, H] float32. Call once.

        Raises ShardUnavailable, DeadlineExceeded, or what a shard said of this step.
        """
        try:
            self._collect()
            for pending in self.far:
                self._answered += pending.wait()
        except MeshfireError:
            self._abandon()
            raise
        partials = []
        for hop in self._answered:
            partial = partial_of(hop)
            count(hop, partial, self.stats.setdefault(hop.shard_id, HopStats()))
            partials.append(partial)
        total = combine(partials, *self.step.hidden.shape)
        for hop in self._answered:
            if isinstance(hop.answer, Frame):
                hop.answer.release()
        return total

    def _collect(self) -> None:
        """Until every hop on a lane is answered or somebody else's."""
        limit_s = 0.0  # first those that are there already: they have cost no wait
        while self.near:
            lanes = {lane for lane, _ in self.near}
            for lane in ready(lanes, limit_s):
                lane.read(waited=limit_s > 0)
            self._sort_out()
            limit_s = self._patience_s()

    def _sort_out(self) -> None:
        """Take what is answered, pass on what a lost lane or a refusal left over."""
        near, lost = [], []
        for lane, hop in self.near:
            if hop.answer is not None:
                self._accept(hop)
            elif lane.broken:
                lane.drop(hop)
                lost.append(hop)
            else:
                near.append((lane, hop))
        self.near = near
        if lost:
            self.far.append(self.carer.take_on(self.step, lost))

    def _accept(self, hop: Hop) -> None:
        assert hop.answer is not None
        error = error_in(hop.answer)
        if error is None:
            self._answered.append(hop)
        elif error.retryable or isinstance(error, StaleEpoch):
            self.far.append(self.carer.take_on(self.step, [hop], refused=True))
        else:
            raise error

    def _patience_s(self) -> float:
        """How long to sleep at most. Raises the deadline's error; a lane that is silent for too long is ended."""
        left_s = self.step.deadline - time.monotonic()
        if left_s <= 0 and self.near:
            owing = sorted({hop.shard_id for _, hop in self.near})
            raise self.carer.late(owing, self.step.layer)
        for lane, _ in self.near:
            if lane.quiet_s > self.carer.stall_s and not lane.broken:
                self.carer.silent(lane)
                lane.shut()
        return min(left_s, self.carer.stall_s, _LOOK_S)

    def _abandon(self) -> None:
        for lane, hop in self.near:
            lane.drop(hop)
        for pending in self.far:
            self.carer.abandon(pending)
