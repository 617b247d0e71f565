"""One lease under way: its order, its sequence, and what is counted for its span.

Owns the record and the plan of its next token; the engine decides when it moves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from opentelemetry.trace import Span
from torch import Tensor

from meshfire.kv import lease as kv_lease
from meshfire.kv.hashing import chain_hashes
from meshfire.kv.transfer import KvManifest
from meshfire.model.interface import KvGeometry
from meshfire.model.sampling import SamplingRow
from meshfire.model.sampling_counts import TokenCounts
from meshfire.sched.batch import forward_batch
from meshfire.sched.sequence import Sequence as TokenSequence
from meshfire.telemetry.spans import traceparent_of
from meshfire.worker.hop import HopStats
from services.decode.order import Order
from services.decode.rules import OutputRuler
from services.decode.step import StepPlan, TokenChoice


@dataclass(eq=False)
class DecodeLease:
    """Compared by identity: a newer epoch of the same request is another lease."""

    order: Order
    manifest: KvManifest
    sequence: TokenSequence
    span: Span
    #: this end of the KV's lease: the same state machine as at its owner
    kv: kv_lease.KvLease
    #: while the KV is read
    read_task: asyncio.Task[None] | None = None
    #: [H] of the last token, until the first step has used it
    last_hidden: Tensor | None = None
    kv_bytes: int = 0
    #: holds its output to the order's rule, from before the first step
    ruler: OutputRuler | None = None
    #: the fault has acted
    struck: bool = False
    ended: bool = False
    num_steps: int = 0
    #: sum over its steps of the sequences in them
    batch_total: int = 0
    first_step_ns: int = 0
    shards: dict[str, HopStats] = field(default_factory=dict)

    @cached_property
    def traceparent(self) -> str:
        """Of its own span; every step sends it."""
        return traceparent_of(self.span)

    @cached_property
    def _token_counts(self) -> TokenCounts | None:
        """For penalties, where the order has any; kept over its steps."""
        return TokenCounts(self.order.prompt_ids) if self.order.params.has_penalties else None

    def advance_kv(self, event: type[kv_lease.ReaderEvent]) -> None:
        """One step of the KV's lease. Raises IllegalTransition for a step out of order."""
        reader_id = self.kv.reader_id
        assert reader_id is not None, "a decode worker's lease is granted to it"
        self.kv = kv_lease.apply(self.kv, event(self.kv.epoch, reader_id, time.monotonic()))

    def arrived(self, last_hidden: Tensor, num_bytes: int) -> None:
        """Its KV is complete and verified."""
        self.advance_kv(kv_lease.Acknowledged)
        self.last_hidden, self.kv_bytes = last_hidden, num_bytes

    def stepped(self, batch_size: int, stats: Mapping[str, HopStats], started_ns: int) -> None:
        """One of its tokens was chosen. Shards' costs are those of the whole step, which its sequences share."""
        self.last_hidden = None
        self.sequence.num_computed_tokens = self.sequence.num_tokens
        self.num_steps += 1
        self.batch_total += batch_size
        self.first_step_ns = self.first_step_ns or started_ns
        for shard_id, cost in stats.items():
            add_cost(self.shards.setdefault(shard_id, HopStats()), cost)

    def next_choice(self) -> TokenChoice:
        """How its next token is chosen."""
        sequence, limits = self.sequence, self.order.limits
        index, output_ids = sequence.num_output_tokens, sequence.output_ids
        counts = self._token_counts
        if counts is not None:
            counts.catch_up(output_ids)
        row = SamplingRow(self.order.params, sequence.num_tokens, self.order.prompt_ids, output_ids, counts=counts)
        mask = self.ruler.next_mask(output_ids) if self.ruler else None
        return TokenChoice(row, limits.script.choice(index) if limits.script else None, mask)


def new_lease(order: Order, geometry: KvGeometry, model_revision: str, worker_id: str, span: Span) -> DecodeLease:
    """A lease that waits. `worker_id` is the reader that the KV was granted to: this worker."""
    hashes = tuple(
        chain_hashes(order.token_ids, geometry.block_tokens, model_revision=model_revision, cache_salt=order.cache_salt)
    )
    manifest = KvManifest(model_revision, geometry, len(order.token_ids), hashes)
    sequence = TokenSequence(list(order.token_ids), order.num_prompt_tokens, hashes)
    return DecodeLease(order, manifest, sequence, span, _granted(order, hashes, worker_id))


def _granted(order: Order, hashes: tuple[bytes, ...], worker_id: str) -> kv_lease.KvLease:
    source, now = order.source, time.monotonic()
    offered = kv_lease.offer(
        source.kv_lease_id,
        owner_id=source.address,
        epoch=source.epoch,
        block_hashes=hashes,
        now=now,
        last_deadline=order.deadline,
    )
    return kv_lease.apply(offered, kv_lease.Granted(source.epoch, worker_id, now))


def plan_step(leases: Sequence[DecodeLease], block_tokens: int) -> tuple[list[DecodeLease], StepPlan]:
    """The leases in the order of the plan's rows, and the plan."""
    computing = [lease for lease in leases if lease.last_hidden is None]
    ready = [lease for lease in leases if lease.last_hidden is not None]
    ordered = computing + ready
    batch = forward_batch([lease.sequence for lease in computing], block_tokens) if computing else None
    hidden = tuple(lease.last_hidden for lease in ready if lease.last_hidden is not None)
    return ordered, StepPlan(batch, hidden, tuple(lease.next_choice() for lease in ordered))


def remaining_s(lease: DecodeLease) -> float:
    """Seconds until its deadline; negative if it passed."""
    return lease.order.deadline - time.monotonic()


def add_cost(total: HopStats, more: HopStats) -> None:
    """Add up what a shard cost."""
    total.hops += more.hops
    total.tokens += more.tokens
    total.bytes_out += more.bytes_out
    total.bytes_in += more.bytes_in
    total.wait_ns += more.wait_ns
    total.queue_ns += more.queue_ns
    total.compute_ns += more.compute_ns
