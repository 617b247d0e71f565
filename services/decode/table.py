"""The leases of this worker: found by request, moved by the scheduler, freed exactly once.

Owns who is here and when blocks may be freed: a lease that ends while a step computes keeps its blocks until the step
is over, because the model thread still writes to them. Starts no task and sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from meshfire.errors import StaleEpoch
from meshfire.sched.parts import ChunkBudget, next_parts
from meshfire.sched.policy import Scheduler
from meshfire.sched.sequence import Sequence
from services.decode.lease import DecodeLease
from services.decode.planning import LeasePart
from services.decode.speculation import Speculation


class LeaseTable:
    """Leases that have not ended, in order of arrival. Lives on the event loop."""

    def __init__(self, scheduler: Scheduler, budget: ChunkBudget, speculation: Speculation) -> None:
        self.scheduler = scheduler
        self._budget = budget
        self._speculation = speculation
        self._by_request: dict[tuple[str, str], DecodeLease] = {}
        self._by_sequence: dict[Sequence, DecodeLease] = {}
        self._stepping: frozenset[DecodeLease] = frozenset()

    def __iter__(self) -> Iterator[DecodeLease]:
        return iter(list(self._by_request.values()))

    def __len__(self) -> int:
        return len(self._by_request)

    def older_than(self, router_id: str, request_id: str, epoch: int) -> DecodeLease | None:
        """The lease of an earlier epoch of the same request, which a new one replaces. Raises StaleEpoch."""
        lease = self._by_request.get((router_id, request_id))
        if lease is not None and lease.order.key.epoch >= epoch:
            raise StaleEpoch(
                f"request {request_id} is here at epoch {lease.order.key.epoch}, the lease is of epoch {epoch}",
                metadata={"epoch": str(epoch), "current_epoch": str(lease.order.key.epoch)},
            )
        return lease

    def add(self, lease: DecodeLease) -> None:
        """A new lease that waits. Raises QueueFull, PromptTooLong."""
        self.scheduler.add(lease.sequence)
        self._by_request[lease.order.key.router_id, lease.order.key.request_id] = lease
        self._by_sequence[lease.sequence] = lease

    def admit(self) -> list[DecodeLease]:
        """Leases that got blocks: their KV may be read or computed."""
        return [self._by_sequence[one] for one in self.scheduler.admit()]

    def grow(self) -> list[DecodeLease]:
        """Blocks for the next step; the leases preempted for it, which hold none any more and wait again."""
        return [self._by_sequence[one] for one in self.scheduler.grow()]

    def next_parts(self) -> list[LeasePart]:
        """What the next step computes, oldest lease first; empty if nobody runs."""
        parts = [LeasePart(self._by_sequence[one.sequence], one) for one in next_parts(self.scheduler, self._budget)]
        return self._speculation.with_drafts(parts, self.scheduler)

    def remove(self, lease: DecodeLease) -> None:
        """End a lease; its blocks are free now, or when the step that uses them is over."""
        lease.ended = True
        del self._by_request[lease.order.key.router_id, lease.order.key.request_id]
        if lease not in self._stepping:
            self._free(lease)

    @contextmanager
    def stepping(self, leases: Iterable[DecodeLease]) -> Iterator[None]:
        """While the block runs, the model thread uses the blocks of `leases`."""
        self._stepping = frozenset(leases)
        try:
            yield
        finally:
            done, self._stepping = self._stepping, frozenset()
            for lease in done:
                if lease.ended:
                    self._free(lease)

    def _free(self, lease: DecodeLease) -> None:
        del self._by_sequence[lease.sequence]
        self.scheduler.remove(lease.sequence)
