"""Runs steps on the model thread, and knows what to do with one that fails.

A step is pure, so one that failed in a retryable way is simply run again, after a pause, with whoever is in the batch
by then, until the deadlines of its leases. Any other failure belongs to somebody: the batch is run lease by lease, and
only those that fail alone are failed. Knows nothing of routers; what became of a lease goes to `StepOutcome`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from meshfire.errors import DeadlineExceeded, InternalError, MeshfireError
from meshfire.kv.store import KvStore
from meshfire.model.interface import CausalLM
from meshfire.model.sampling import Sampled
from meshfire.runtime.model_thread import ModelThread
from meshfire.worker.faults import HopFault
from meshfire.worker.hop import HopStats
from meshfire.worker.ports import Experts
from services.decode.instruments import DecodeInstruments
from services.decode.lease import DecodeLease, plan_step, remaining_s
from services.decode.step import run_step
from services.decode.table import LeaseTable

_log = logging.getLogger(__name__)

#: A step gives up this long before the first deadline in it, so that its own error reaches the router in time.
DEADLINE_MARGIN_S = 0.2

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class StepOutcome(Protocol):
    """What a step leads to."""

    async def on_tokens(self, chosen: Sequence[tuple[DecodeLease, Sampled]]) -> None:
        """The next tokens; leases that ended meanwhile are not among them."""

    def on_failure(self, lease: DecodeLease, error: MeshfireError) -> None:
        """This lease cannot go on here."""


@dataclass
class Stepper:
    """Everything that a step takes."""

    model: CausalLM
    store: KvStore
    thread: ModelThread
    experts: Experts
    table: LeaseTable
    step_timeout_s: float
    instruments: DecodeInstruments
    _failures_in_row: int = field(default=0, init=False)

    async def step(self, leases: Sequence[DecodeLease], outcome: StepOutcome) -> None:
        """One token for each of `leases`, or word of why not. Returns normally whatever went wrong."""
        try:
            chosen = await self._compute(leases)
        except Exception as error:
            await self._failed(leases, error, outcome)
        else:
            self._failures_in_row = 0
            await outcome.on_tokens(chosen)

    async def _compute(self, leases: Sequence[DecodeLease]) -> list[tuple[DecodeLease, Sampled]]:
        ordered, plan = plan_step(leases, self.store.geometry.block_tokens)
        deadline = min(lease.order.deadline for lease in leases) - DEADLINE_MARGIN_S
        session = self.experts.session(
            deadline=min(deadline, time.monotonic() + self.step_timeout_s),
            traceparents=[lease.traceparent for lease in leases],
            fault=_hop_fault(leases),
        )
        started, started_ns = time.perf_counter(), time.time_ns()
        with self.table.stepping(leases):
            sampled = await self.thread.run(run_step, self.model, self.store, session, plan)
            alive = [(lease, one) for lease, one in zip(ordered, sampled, strict=True) if not lease.ended]
        self.instruments.step_done(len(leases), time.perf_counter() - started)
        _count([lease for lease, _ in alive], len(leases), session.stats, started_ns)
        return alive

    async def _failed(self, leases: Sequence[DecodeLease], error: Exception, outcome: StepOutcome) -> None:
        if isinstance(error, MeshfireError) and (error.retryable or isinstance(error, DeadlineExceeded)):
            await self._back_off(leases, error, outcome)
            return
        if not isinstance(error, MeshfireError):
            _log.error("a step of %d sequences failed", len(leases), exc_info=error)
        if len(leases) > 1:
            for lease in leases:
                if not lease.ended:
                    await self.step([lease], outcome)
        elif not leases[0].ended:
            known = error if isinstance(error, MeshfireError) else InternalError("the step failed")
            outcome.on_failure(leases[0], known)

    async def _back_off(self, leases: Sequence[DecodeLease], error: MeshfireError, outcome: StepOutcome) -> None:
        """Give up those whose time will be over at the next try; pause for the others."""
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**self._failures_in_row)
        self._failures_in_row = min(self._failures_in_row + 1, 16)
        _log.warning("a step of %d sequences failed, tried again in %.2f s: %s", len(leases), pause_s, error)
        waiting = [lease for lease in leases if not lease.ended]
        for lease in waiting:
            if remaining_s(lease) < pause_s + DEADLINE_MARGIN_S:
                outcome.on_failure(lease, error)
        if any(not lease.ended for lease in waiting):
            await asyncio.sleep(pause_s)


def _count(leases: Sequence[DecodeLease], batch_size: int, stats: Mapping[str, HopStats], started_ns: int) -> None:
    for lease in leases:
        lease.stepped(batch_size, stats, started_ns)


def _hop_fault(leases: Sequence[DecodeLease]) -> HopFault | None:
    """Test hook: what an expert shard shall rehearse at the token that this step computes; one lease's at a time."""
    for lease in leases:
        fault = lease.order.fault
        if fault is None or fault.role != "expert" or lease.struck or fault.trigger is None:
            continue
        if fault.strikes(token=lease.sequence.num_output_tokens):
            lease.struck = True
            return HopFault(replace(fault, trigger=None))
    return None
