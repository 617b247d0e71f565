"""One lease under way: its order, its sequence, and what is counted for its span.

Owns the record and the choice of its next token; the engine decides when it moves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from opentelemetry.trace import Span
from torch import Tensor

from meshfire.kv import lease as kv_lease
from meshfire.kv.hashing import HashChain
from meshfire.model.interface import KvGeometry
from meshfire.model.sampling import SamplingRow
from meshfire.model.sampling_counts import TokenCounts
from meshfire.sched.sequence import Sequence as TokenSequence
from meshfire.telemetry.spans import traceparent_of
from meshfire.worker.hop import HopStats
from services.decode.drafting import DraftPace
from services.decode.ending import Ending
from services.decode.order import Order
from services.decode.read_lease import ReadLease, granted
from services.decode.rules import OutputRuler
from services.decode.step import TokenChoice


@dataclass(eq=False)
class DecodeLease:
    """Compared by identity: a newer epoch of the same request is another lease."""

    order: Order
    sequence: TokenSequence
    span: Span
    #: of the KV at its prefill worker; None = this worker computes the prompt
    reading: ReadLease | None
    #: while its rule is opened or its KV read
    preparing: asyncio.Task[None] | None = None
    #: [H] of the last token, until the first step has used it
    last_hidden: Tensor | None = None
    kv_bytes: int = 0
    #: prompt tokens whose KV was found here when it was first admitted; None = not admitted yet
    num_cached_tokens: int | None = None
    #: the router knows that the prompt is computed
    prompt_told: bool = False
    num_preemptions: int = 0
    #: guesses its next tokens; None = nothing was guessed yet
    drafts: DraftPace | None = None
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

    @property
    def prompt_computed(self) -> bool:
        """Whether the KV of everything that it came with is here."""
        return self.sequence.num_computed_tokens >= len(self.order.token_ids)

    @property
    def lacks_ruler(self) -> bool:
        """Whether its rule is not open yet."""
        return self.order.rule is not None and self.ruler is None

    def admitted(self, block_tokens: int) -> None:
        """It got blocks."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = self.sequence.num_held_blocks * block_tokens

    def arrived(self, last_hidden: Tensor, num_bytes: int) -> None:
        """Its KV is complete and verified."""
        assert self.reading is not None
        self.reading.advance(kv_lease.Acknowledged)
        self.last_hidden, self.kv_bytes = last_hidden, num_bytes

    def preempted(self) -> None:
        """Its blocks are gone; a read that was under way is to be done again."""
        self.num_preemptions += 1
        self.last_hidden = None
        if self.preparing is not None:
            self.preparing.cancel()
            self.preparing = None
            if self.reading is not None:
                self.reading.advance(kv_lease.ReadAborted)

    def stepped(self, batch_size: int, stats: Mapping[str, HopStats], started_ns: int) -> None:
        """It had part in a step. Shards' costs are those of the whole step, which its sequences share."""
        self.last_hidden = None
        self.num_steps += 1
        self.batch_total += batch_size
        self.first_step_ns = self.first_step_ns or started_ns
        for shard_id, cost in stats.items():
            add_cost(self.shards.setdefault(shard_id, HopStats()), cost)

    def choices(self, draft_ids: Sequence[int] = ()) -> Iterator[TokenChoice]:
        """How its next token is chosen, and the one after each draft, should all drafts before be right."""
        sequence, limits = self.sequence, self.order.limits
        output_ids = sequence.output_ids
        counts = self._token_counts
        if counts is not None:
            counts.catch_up(output_ids)
        forced = limits.script.choice(len(output_ids)) if limits.script else None
        row = self._row(0, output_ids, counts)
        if self.ruler is None:
            yield TokenChoice(row, forced)
        else:
            wish = self.ruler.wish(self.order.wanted, output_ids) if self.order.wanted else None
            yield TokenChoice(row, forced, self.ruler.next_mask(output_ids), wish)
        for number in range(1, len(draft_ids) + 1):
            so_far = [*output_ids, *draft_ids[:number]]
            yield TokenChoice(self._row(number, so_far, counts.with_more(so_far) if counts is not None else None))

    def _row(self, offset: int, output_ids: Sequence[int], counts: TokenCounts | None) -> SamplingRow:
        position = self.sequence.num_tokens + offset
        return SamplingRow(self.order.params, position, self.order.prompt_ids, output_ids, counts=counts)

    def ending_before_next(self) -> Ending | None:
        """The end of its output if no token can follow."""
        sequence, wanted = self.sequence, self.order.wanted
        ending = self.order.limits.ending_before(sequence.num_output_tokens, sequence.num_tokens)
        if ending is None and self.ruler is not None and wanted is not None:
            return self.ruler.wish_ends_before(wanted, sequence.output_ids)
        return ending


def new_lease(order: Order, geometry: KvGeometry, model_revision: str, worker_id: str, span: Span) -> DecodeLease:
    """A lease that waits."""
    chain = HashChain(geometry.block_tokens, model_revision=model_revision, cache_salt=order.cache_salt)
    source = order.source
    reading = None if source is None else granted(order, source, geometry, model_revision, worker_id)
    sequence = TokenSequence(
        list(order.token_ids),
        order.num_prompt_tokens,
        chain,
        kv_comes=source is not None,
        wanted_from=0 if order.num_scored else None,
    )
    return DecodeLease(order, sequence, span, reading)


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
