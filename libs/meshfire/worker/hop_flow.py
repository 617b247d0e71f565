"""Hops from the model thread to the shards and their answers back.

Owns making hops of a step, retrying what a shard refuses for now, moving what a lost or silent shard holds to
replicas, and giving up at the deadline. Knows links and the placement in force only through `ShardPeers`.

Threads: `dispatch` and what it calls run on the model thread and touch nothing that the loop changes in place; one
`call_soon_threadsafe` per dispatch hands all its hops over. Everything else runs on the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, MutableMapping, Sequence

import torch
from torch import Tensor

from meshfire.api.common.v1 import tensor_pb2
from meshfire.api.expert_shard.v1 import expert_shard_service_pb2 as pb
from meshfire.dispatch.plan import ShardPart, ShardPlanner
from meshfire.errors import DeadlineExceeded, MeshfireError, ShardUnavailable, StaleEpoch
from meshfire.rpc import tensors
from meshfire.rpc.status import from_reason
from meshfire.worker.hop import Hop, HopStats, PendingHops, Step
from meshfire.worker.hop_link import ShardLink
from meshfire.worker.hop_peers import ShardPeers

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
        self._loop = loop
        self._stall_s = stall_s
        self._hop_ids = itertools.count(1)
        self._refused: list[Hop] = []
        self._wake = asyncio.Event()
        self._closed = False

    # --- model thread -------------------------------------------------------------------------------------------------

    def dispatch(self, step: Step, stats: MutableMapping[str, HopStats]) -> PendingHops:
        """Send one layer's rows to their shards. Raises ShardUnavailable without a placement, UnknownExpert."""
        planner = self._peers.planner
        if planner is None or self._closed:
            raise ShardUnavailable("no placement is in force: wait for ready()")
        pending = PendingHops(step, stats, self._give_up)
        hops = list(self._hops(pending, None, step.topk_ids, planner, self._peers.load(), step.fault))
        if hops:
            pending.waiting.update(hops)
            self._loop.call_soon_threadsafe(self._submit_all, pending, hops)
        else:
            pending.done.set_result(None)
        return pending

    def _hops(
        self,
        pending: PendingHops,
        base: Tensor | None,
        topk_ids: Tensor,
        planner: ShardPlanner,
        load: dict[str, int],
        fault: str = "",
    ) -> Iterator[Hop]:
        """Hops for `topk_ids` [n, K], the rows `base` [n] of the step (None = all of it)."""
        encoder = _Encoder(pending.step)
        max_rows = max(1, MAX_ANSWER_BYTES // (_FIXED_ITEM_BYTES * pending.step.hidden.shape[1]))
        for part in planner.plan(topk_ids, pending.step.layer, load):
            for rows, ids in _pieces(part, base, max_rows):
                request = pb.ForwardRequest(
                    hop_id=next(self._hop_ids),
                    layer=pending.step.layer,
                    placement_epoch=planner.shard_map.epoch,
                    hidden=encoder.hidden(rows),
                    topk_ids=tensors.encode(ids),
                    topk_weights=encoder.weights(rows),
                    traceparents=pending.step.traceparents,
                    fault=fault,
                )
                yield Hop(pending, part.shard_id, rows, ids, request, time.perf_counter_ns())

    def _give_up(self, pending: PendingHops) -> MeshfireError:
        """The deadline's error, which names the shards that still owe an answer."""
        owing = sorted({hop.shard_id for hop in tuple(pending.waiting)})
        self._loop.call_soon_threadsafe(self._forget, pending)
        return self._late(owing, pending.step.layer)

    def _late(self, owing: Sequence[str], layer: int) -> MeshfireError:
        away = [shard_id for shard_id in owing if not self._peers.is_live(shard_id)]
        if away:
            return ShardUnavailable(f"layer {layer}: shards {away} were away until the deadline", field="deadline")
        return DeadlineExceeded(f"layer {layer}: the deadline passed before shards {list(owing)} answered")

    # --- event loop ---------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something changed that may let hops go on."""
        self._wake.set()

    def on_answer(self, hop: Hop, response: pb.ForwardResponse) -> None:
        """Pass a result on; retry a refusal that can pass; fail the dispatch for any other."""
        if response.WhichOneof("result") == "output":
            hop.pending.answer(hop, response)
            return
        said = response.error
        error = from_reason(said.reason, said.message, dict(said.metadata), retryable=False)
        if error.retryable or isinstance(error, StaleEpoch):
            log.info("shard %s refuses hop %d for now: %s", hop.shard_id, response.hop_id, error)
            self._refused.append(hop)
            self._wake.set()
        else:
            self._fail(hop.pending, error)

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

    def _retry_refused(self) -> None:
        refused, self._refused = self._refused, []
        for hop in refused:
            if self._is_over(hop):
                continue
            self._replace(hop, self._replan(hop))

    def _look_after(self, link: ShardLink) -> None:
        """Move on what an absent or silent shard holds, and end what is late."""
        if link.quiet_s > self._stall_s and not link.stalled:
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
        return list(self._hops(hop.pending, hop.rows, hop.topk_ids, planner, self._peers.load()))

    def _replace(self, hop: Hop, others: Sequence[Hop]) -> None:
        hop.pending.replace(hop, others)
        self._submit_all(hop.pending, others)

    def _is_over(self, hop: Hop) -> bool:
        """Whether nobody waits for the hop any more; a deadline that has passed ends it here."""
        if time.monotonic() >= hop.pending.step.deadline:
            owing = sorted({one.shard_id for one in hop.pending.waiting})
            self._fail(hop.pending, self._late(owing, hop.pending.step.layer))
        return hop not in hop.pending.waiting

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
            self._fail(hop.pending, error)


class _Encoder:
    """A step's tensors as messages; the whole step is encoded once, however many shards get it."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._whole: tuple[tensor_pb2.Tensor, tensor_pb2.Tensor] | None = None

    def hidden(self, rows: Tensor | None) -> tensor_pb2.Tensor:
        return self._all()[0] if rows is None else tensors.encode(self._step.hidden[rows])

    def weights(self, rows: Tensor | None) -> tensor_pb2.Tensor:
        return self._all()[1] if rows is None else tensors.encode(self._step.topk_weights[rows])

    def _all(self) -> tuple[tensor_pb2.Tensor, tensor_pb2.Tensor]:
        if self._whole is None:
            self._whole = (tensors.encode(self._step.hidden), tensors.encode(self._step.topk_weights))
        return self._whole


def _pieces(part: ShardPart, base: Tensor | None, max_rows: int) -> Iterator[tuple[Tensor | None, Tensor]]:
    """(rows of the step, expert ids) of a part, at most `max_rows` at a time."""
    num_rows = len(part.topk_ids)
    rows = part.rows if base is None else base if part.rows is None else base[part.rows]
    if num_rows <= max_rows:
        yield rows, part.topk_ids
        return
    rows = torch.arange(num_rows) if rows is None else rows
    for start in range(0, num_rows, max_rows):
        stop = start + max_rows
        yield rows[start:stop], part.topk_ids[start:stop]
