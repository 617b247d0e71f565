"""Runs steps on the model thread, and knows what to do with one that fails.

A step is pure, so one that failed in a retryable way is simply run again, after a pause, with whoever is in the batch
by then, until the deadlines of its leases. Any other failure belongs to somebody: the batch is run lease by lease, and
only those that fail alone are failed. Knows nothing of routers; what became of a lease goes to `StepOutcome`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from meshfire.errors import DeadlineExceeded, InternalError, MeshfireError
from meshfire.kv.store import KvStore
from meshfire.model.interface import CausalLM
from meshfire.runtime.model_thread import ModelThread
from meshfire.worker.faults import Fault, HopFault
from meshfire.worker.ports import Experts
from services.decode.instruments import DecodeInstruments
from services.decode.lease import DecodeLease, remaining_s
from services.decode.planning import LeasePart, PartResult, PlannedStep
from services.decode.step import run_step
from services.decode.table import LeaseTable

_log = logging.getLogger(__name__)

#: A step gives up this long before the first deadline in it, so that its own error reaches the router in time.
DEADLINE_MARGIN_S = 0.2

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class StepOutcome(Protocol):
    """What a step leads to."""

    async def on_results(self, results: Sequence[PartResult]) -> None:
        """What was computed; leases that ended meanwhile are not among them."""

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

    async def step(self, parts: Sequence[LeasePart], outcome: StepOutcome) -> None:
        """Compute `parts`, or say why not. Returns normally whatever went wrong."""
        try:
            results = await self._compute(parts)
        except Exception as error:
            await self._failed(parts, error, outcome)
        else:
            self._failures_in_row = 0
            await outcome.on_results(results)

    async def _compute(self, parts: Sequence[LeasePart]) -> list[PartResult]:
        step, leases = PlannedStep(parts), [one.lease for one in parts]
        deadline = min(lease.order.deadline for lease in leases) - DEADLINE_MARGIN_S
        session = self.experts.session(
            deadline=min(deadline, time.monotonic() + self.step_timeout_s),
            traceparents=[lease.traceparent for lease in leases],
            fault=_hop_fault(parts),
        )
        started, started_ns = time.perf_counter(), time.time_ns()
        with self.table.stepping(leases):
            done = await self.thread.run(run_step, self.model, self.store, session, step.plan)
            results = list(step.results(done))
            alive = [one for one in results if not one.lease.ended]
        self.instruments.step_done(results, time.perf_counter() - started)
        for one in alive:
            one.lease.stepped(len(parts), session.stats, started_ns)
        return alive

    async def _failed(self, parts: Sequence[LeasePart], error: Exception, outcome: StepOutcome) -> None:
        if isinstance(error, MeshfireError) and (error.retryable or isinstance(error, DeadlineExceeded)):
            await self._back_off([one.lease for one in parts], error, outcome)
            return
        if not isinstance(error, MeshfireError):
            _log.error("a step of %d sequences failed", len(parts), exc_info=error)
        if len(parts) > 1:
            for one in parts:
                if not one.lease.ended:
                    await self.step([one], outcome)
        elif not parts[0].lease.ended:
            known = error if isinstance(error, MeshfireError) else InternalError("the step failed")
            outcome.on_failure(parts[0].lease, known)

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


def _hop_fault(parts: Sequence[LeasePart]) -> HopFault | None:
    """Test hook: what an expert shard shall rehearse in this step; one lease's at a time."""
    for one in parts:
        lease, fault = one.lease, one.lease.order.fault
        if fault is None or fault.role != "expert" or lease.struck:
            continue
        if _is_due(fault, one):
            lease.struck = True
            trigger = fault.trigger if fault.trigger is not None and fault.trigger.name == "layer" else None
            return HopFault(replace(fault, trigger=trigger))
    return None


def _is_due(fault: Fault, one: LeasePart) -> bool:
    """At its token; without one while the prompt is computed, which this worker may leave to another."""
    if fault.trigger is not None and fault.trigger.name == "token":
        return one.part.is_last and fault.strikes(token=one.lease.sequence.num_output_tokens)
    return one.lease.reading is None and not one.lease.prompt_computed
