"""Hops from the model thread to the shards and their answers back.

Owns making hops of a step, retrying what a shard refuses for now, moving what a lost or silent shard holds to
replicas, and giving up at the deadline. Knows links and the placement in force only through `ShardPeers`.

Threads: `dispatch` and what it calls run on the model thread and touch nothing that the loop changes in place. Hops go
out on lanes from there; those that have none, or that a lane failed, are handed over by `take_on`, with one
`call_soon_threadsafe`. Everything else runs on the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, MutableMapping, Sequence

from torch import Tensor

from meshfire.api.expert_shard.v1 import expert_shard_service_pb2 as pb
from meshfire.dispatch.plan import ShardPlanner
from meshfire.errors import DeadlineExceeded, MeshfireError, ShardUnavailable, StaleEpoch
from meshfire.worker.hop import Hop, HopStats, PendingHops, Step
from meshfire.worker.hop_dispatch import Dispatch
from meshfire.worker.hop_lane import HopLane
from meshfire.worker.hop_link import ShardLink
from meshfire.worker.hop_peers import ShardPeers
from meshfire.worker.hop_wire import error_in, pieces

log = logging.getLogger(__name__)

#: largest answer of one hop; longer steps travel as several hops, which also lets the shard start earlier
MAX_ANSWER_BYTES = 1024 * 1024
_FIXED_ITEM_BYTES = 8
_TICK_S = 0.25
_RETRY_PAUSE_S = 0.03


class HopFlow:
    """All dispatches of one mesh. `run()` lives in the owner's TaskGroup."""

    def __init__(self, peers: ShardPeers, loop: asyncio.AbstractEventLoop, *, stall_s: float) -> None:
        self._peers = peers
        #: a live shard that answers nothing for so long counts as frozen
        self.stall_s = stall_s
        self._loop = loop
        self._hop_ids = itertools.count(1)
        self._refused: list[Hop] = []
        self._wake = asyncio.Event()
        self._closed = False

    # --- model thread -------------------------------------------------------------------------------------------------

    def dispatch(self, step: Step, stats: MutableMapping[str, HopStats]) -> Dispatch:
        """Send one layer's rows to their shards. Raises ShardUnavailable without a placement, UnknownExpert."""
        planner = self._peers.planner
        if planner is None or self._closed:
            raise ShardUnavailable("no placement is in force: wait for ready()")
        dispatch = Dispatch(step, stats, self)
        far = []
        for hop in self._hops(step, None, step.topk_ids, planner, self._peers.load(), step.fault):
            lane = self._peers.lane(hop.shard_id)
            if lane is None:
                far.append(hop)
            else:
                dispatch.near.append((lane, hop))
                lane.send(hop)
                hop.fault = ""  # told
        if far:
            dispatch.far.append(self.take_on(step, far))
        return dispatch

    def take_on(self, step: Step, hops: Sequence[Hop], *, refused: bool = False) -> PendingHops:
        """Hand hops over to the event loop. Raises ShardUnavailable once the mesh is closed."""
        if self._closed:
            raise ShardUnavailable("the expert mesh was closed")
        pending = PendingHops(step, self._give_up, waiting=set(hops))
        for hop in hops:
            hop.pending = pending
        self._loop.call_soon_threadsafe(self._retry_later if refused else self._submit_all, pending, hops)
        return pending

    def silent(self, lane: HopLane) -> None:
        """A lane's shard counts as frozen until it answers."""
        self._loop.call_soon_threadsafe(self._stall, lane)

    def abandon(self, pending: PendingHops) -> None:
        """Nobody waits for these any more."""
        self._loop.call_soon_threadsafe(self._forget, pending)

    def late(self, owing: Sequence[str], layer: int) -> MeshfireError:
        """The deadline's error, which names the shards that still owe an answer."""
        away = [shard_id for shard_id in owing if not self._peers.is_live(shard_id)]
        if away:
            return ShardUnavailable(f"layer {layer}: shards {away} were away until the deadline", field="deadline")
        return DeadlineExceeded(f"layer {layer}: the deadline passed before shards {list(owing)} answered")

    def _hops(
        self,
        step: Step,
        base: Tensor | None,
        topk_ids: Tensor,
        planner: ShardPlanner,
        load: dict[str, int],
        fault: str = "",
    ) -> Iterator[Hop]:
        """Hops for `topk_ids` [n, K], the rows `base` [n] of the step (None = all of it)."""
        max_rows = max(1, MAX_ANSWER_BYTES // (_FIXED_ITEM_BYTES * step.hidden.shape[1]))
        epoch = planner.shard_map.epoch
        for part in planner.plan(topk_ids, step.layer, load):
            for rows, ids in pieces(part, base, max_rows):
                yield Hop(next(self._hop_ids), step, part.shard_id, epoch, rows, ids, fault, time.perf_counter_ns())

    def _give_up(self, pending: PendingHops) -> MeshfireError:
        owing = sorted({hop.shard_id for hop in tuple(pending.waiting)})
        self.abandon(pending)
        return self.late(owing, pending.step.layer)

    # --- event loop ---------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something changed that may let hops go on."""
        self._wake.set()

    def on_answer(self, hop: Hop, response: pb.ForwardResponse) -> None:
        """Pass a result on; retry a refusal that can pass; fail the dispatch for any other."""
        error = error_in(response)
        pending = _pending_of(hop)
        if error is None:
            pending.answer(hop, response)
        elif error.retryable or isinstance(error, StaleEpoch):
            log.info("shard %s refuses hop %d for now: %s", hop.shard_id, response.hop_id, error)
            self._refused.append(hop)
            self._wake.set()
        else:
            self._fail(pending, error)

    async def run(self) -> None:
        """Keep hops moving; ends only by cancellation, and then fails what still waits."""
        try:
            while True:
                await self._next_turn()
                if self._refused:
                    await asyncio.sleep(_RETRY_PAUSE_S)
                    await self._peers.refresh()
                self._retry_refused()
                for link in self._peers.links:
                    self._look_after(link)
        finally:
            self._close()

    async def _next_turn(self) -> None:
        try:
            async with asyncio.timeout(_TICK_S):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _submit_all(self, pending: PendingHops, hops: Sequence[Hop]) -> None:
        try:
            if self._closed:
                raise ShardUnavailable("the expert mesh was closed")
            for hop in hops:
                self._peers.link(hop.shard_id).submit(hop)
        except MeshfireError as error:
            self._fail(pending, error)

    def _retry_later(self, pending: PendingHops, hops: Sequence[Hop]) -> None:
        if self._closed:
            self._fail(pending, ShardUnavailable("the expert mesh was closed"))
            return
        self._refused += hops
        self._wake.set()

    def _stall(self, lane: HopLane) -> None:
        link = self._peers.link(lane.shard_id)
        if link.lane is lane:
            log.warning("shard %s has not answered on its lane for %.1f s", link.shard_id, self.stall_s)
            link.stalled = True
            self._wake.set()

    def _retry_refused(self) -> None:
        refused, self._refused = self._refused, []
        for hop in refused:
            if self._is_over(hop):
                continue
            self._replace(hop, self._replan(hop))

    def _look_after(self, link: ShardLink) -> None:
        """Move on what an absent or silent shard holds, and end what is late."""
        if link.quiet_s > self.stall_s and not link.stalled:
            log.warning("shard %s has not answered for %.1f s", link.shard_id, link.quiet_s)
            link.stalled = True
        if link.stalled and link.left_behind:
            link.break_off()
        lost = link.stalled or not link.live
        for hop in link.waiting:
            if not self._is_over(hop) and lost:
                self._move(link, hop)

    def _move(self, link: ShardLink, hop: Hop) -> None:
        """To replicas, if all of its experts have a live one; else it waits for its shard."""
        others = self._replan(hop)
        if all(self._peers.is_live(other.shard_id) for other in others):
            log.info("moving a hop of shard %s to %s", link.shard_id, [other.shard_id for other in others])
            link.withdraw(hop)
            self._replace(hop, others)

    def _replan(self, hop: Hop) -> list[Hop]:
        planner = self._peers.planner
        assert planner is not None, "a hop exists, so a placement was in force"
        others = list(self._hops(hop.step, hop.rows, hop.topk_ids, planner, self._peers.load()))
        for other in others:
            other.pending = hop.pending
        return others

    def _replace(self, hop: Hop, others: Sequence[Hop]) -> None:
        pending = _pending_of(hop)
        pending.replace(hop, others)
        self._submit_all(pending, others)

    def _is_over(self, hop: Hop) -> bool:
        """Whether nobody waits for the hop any more; a deadline that has passed ends it here."""
        pending = _pending_of(hop)
        if time.monotonic() >= hop.step.deadline:
            owing = sorted({one.shard_id for one in pending.waiting})
            self._fail(pending, self.late(owing, hop.step.layer))
        return hop not in pending.waiting

    def _fail(self, pending: PendingHops, error: MeshfireError) -> None:
        self._withdraw(pending)
        pending.fail(error)

    def _forget(self, pending: PendingHops) -> None:
        self._withdraw(pending)
        pending.waiting.clear()

    def _withdraw(self, pending: PendingHops) -> None:
        for link in self._peers.links:
            for hop in link.waiting:
                if hop.pending is pending:
                    link.withdraw(hop)

    def _close(self) -> None:
        self._closed = True
        error = ShardUnavailable("the expert mesh was closed")
        waiting = [hop for link in self._peers.links for hop in link.waiting]
        for hop in (*waiting, *self._refused):
            self._fail(_pending_of(hop), error)


def _pending_of(hop: Hop) -> PendingHops:
    assert hop.pending is not None, "the event loop gets only hops that it takes on"
    return hop.pending
