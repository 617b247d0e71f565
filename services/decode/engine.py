"""The decode engine: leases in, tokens out.

    lease ──▶ waiting ──blocks──▶ reading KV ──verified──▶ running ──▶ finished | failed
                 ▲  └───────────without KV──────────────────▶ │
                 └──────────────preempted─────────────────────┘
                  cancel, deadline, lost router: from anywhere, within one step

Owns the life of a lease and the step loop. How KV is read, how a step is computed and what ends an output are the
business of its parts. All of it lives on the event loop; only `step.run_step` runs on the model thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from opentelemetry.trace import Tracer

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.errors import DeadlineExceeded, Draining, InternalError, MeshfireError
from meshfire.kv import lease as kv_lease
from meshfire.model.interface import KvGeometry
from meshfire.telemetry import names
from meshfire.telemetry.spans import span
from meshfire.worker import prompt_logprobs
from meshfire.worker.faults import strike
from meshfire.worker.ports import Experts, Link
from services.decode import reports, wire
from services.decode.ending import Ending
from services.decode.instruments import DecodeInstruments
from services.decode.lease import DecodeLease, new_lease, remaining_s
from services.decode.order import Order
from services.decode.planning import PartResult
from services.decode.ports import Reader
from services.decode.read_lease import ReadLease
from services.decode.rules import RuleBook
from services.decode.stepper import Stepper
from services.decode.table import LeaseTable
from services.decode.taking import take
from services.decode.trace import end_lease_span, start_lease_span

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """Who this worker is, and of which model."""

    worker_id: str
    #: name in discovery, which faults aim at
    instance_id: str
    facts: wire.WorkerFacts
    model_revision: str
    geometry: KvGeometry


class DecodeEngine:
    """Implements `LeaseHandler` of the worker link and `StepOutcome` of the stepper.

    `run(link)` is its life; leases are taken only while it runs.
    """

    def __init__(
        self,
        identity: Identity,
        table: LeaseTable,
        reader: Reader,
        stepper: Stepper,
        rules: RuleBook,
        experts: Experts,
        tracer: Tracer,
        instruments: DecodeInstruments,
    ) -> None:
        self._identity = identity
        self._table = table
        self._reader = reader
        self._stepper = stepper
        self._rules = rules
        self._experts = experts
        self._tracer = tracer
        self._instruments = instruments
        self._link: Link | None = None
        self._group: asyncio.TaskGroup | None = None
        self._draining = False
        self._work = asyncio.Event()  # somebody may run
        self._arrival = asyncio.Event()  # a deadline more to keep
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self, link: Link) -> None:
        """Serve until cancelled; then every lease ends without a word: its router sees the stream end."""
        self._link = link
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._keep_deadlines(), name="decode-deadlines")
            try:
                self._settle()
                await self._keep_stepping()
            finally:
                self._group = None
                for lease in self._table:
                    self._close(lease)

    async def drain(self) -> None:
        """Take no more leases; return when the last one has ended."""
        self._draining = True
        self._settle()
        await self._idle.wait()

    # --- LeaseHandler -------------------------------------------------------------------------------------------------

    def on_lease(self, router_id: str, lease: pb.Lease) -> None:
        """Queue it. Raises BadInput, QueueFull, StaleEpoch, Draining, TestHooksOff: the link answers with that."""
        if self._group is None or self._draining:
            raise Draining("this worker takes no new leases")
        order = wire.order_from(router_id, lease, self._identity.facts, now=time.monotonic())
        replaced = self._table.older_than(router_id, order.key.request_id, order.key.epoch)
        if replaced is not None:
            self._close(replaced)
        self._begin(order)
        self._settle()

    def on_cancel(self, router_id: str, request_id: str, epoch: int) -> None:
        """End this epoch and older ones."""
        for lease in self._table:
            if lease.order.key.cancelled_by(router_id, request_id, epoch):
                self._close(lease)

    def on_kv_grant(self, router_id: str, grant: pb.KvGrant) -> None:
        """Grants are for prefill workers."""
        _log.warning("router %s sent a KV grant to a decode worker", router_id)

    def on_router_lost(self, router_id: str) -> None:
        """Nobody waits for these tokens any more."""
        for lease in self._table:
            if lease.order.key.router_id == router_id:
                self._close(lease)

    # --- life of a lease ----------------------------------------------------------------------------------------------

    def _begin(self, order: Order) -> None:
        span = start_lease_span(self._tracer, order, self._identity.worker_id, self._identity.facts.model)
        identity = self._identity
        lease = new_lease(order, identity.geometry, identity.model_revision, identity.worker_id, span)
        try:
            self._table.add(lease)
        except MeshfireError as error:
            end_lease_span(self._tracer, lease, None, error)
            raise
        self._idle.clear()
        self._arrival.set()
        ending = lease.ending_before_next()
        if ending is not None and not order.prompt_only:  # only the word that all is done was lost
            self._finish(lease, ending)

    def _settle(self) -> None:
        """After any change of who is here: admit who fits, and say how much room is left."""
        if self._group is None or self._link is None:
            return
        scheduler = self._table.scheduler
        for lease in self._table.admit():
            lease.admitted(self._identity.geometry.block_tokens)
            if lease.sequence.kv_comes or lease.lacks_ruler:
                name = f"prepare {lease.order.key.request_id}"
                lease.preparing = self._group.create_task(self._prepare(lease), name=name)
            else:
                self._compute(lease)
        num_slots = 0 if self._draining else max(0, scheduler.num_slots)
        self._link.set_credit(num_slots, scheduler.num_spare_blocks, scheduler.num_pending_tokens)

    async def _prepare(self, lease: DecodeLease) -> None:
        """Open its rule, then read its KV: others step meanwhile."""
        order = lease.order
        if lease.lacks_ruler and order.rule is not None:
            scripted = order.limits.script is not None
            try:
                lease.ruler = await self._rules.open(order.rule, in_reasoning=order.in_reasoning, may_break=scripted)
            except MeshfireError as error:
                lease.preparing = None
                self._fail(lease, error, retryable=error.retryable)
                return
            ending = lease.ending_before_next()
            if ending is not None:
                lease.preparing = None
                self._finish(lease, ending)
                return
        if lease.sequence.kv_comes and lease.reading is not None:
            await self._read(lease, lease.reading)
        else:
            lease.preparing = None
            self._compute(lease)

    def _compute(self, lease: DecodeLease) -> None:
        """Its tokens are computed in the steps from now on."""
        self._table.scheduler.compute(lease.sequence)
        self._work.set()

    async def _read(self, lease: DecodeLease, reading: ReadLease) -> None:
        sequence = lease.sequence
        attributes = {
            names.ATTR_KV_BLOCKS: len(sequence.block_table),
            names.ATTR_KV_BLOCKS_REUSED: sequence.num_held_blocks,
        }
        parent = lease.traceparent
        reading.advance(kv_lease.ReadStarted)
        try:
            with span(self._tracer, names.SPAN_DECODE_READ_KV, parent=parent, attributes=attributes) as read_span:
                read = await self._reader.read(
                    reading.source, reading.manifest, sequence.block_table, sequence.num_held_blocks
                )
                read_span.set_attribute(names.ATTR_KV_BYTES, read.num_bytes)
        except Exception as error:
            lease.preparing = None
            reading.advance(kv_lease.ReadAborted)
            self._read_failed(lease, error)
            return
        lease.preparing = None
        lease.arrived(read.last_hidden, read.num_bytes)
        self._instruments.kv_read(read.num_bytes)
        self._table.scheduler.arrived(sequence)
        self._release_kv(lease)
        self._work.set()

    def _read_failed(self, lease: DecodeLease, error: Exception) -> None:
        """Another prefill may do better, whatever went wrong with this one."""
        if not isinstance(error, MeshfireError):
            _log.error("reading KV of request %s failed", lease.order.key.request_id, exc_info=error)
            error = InternalError("the KV could not be read")
        self._fail(lease, error, retryable=True)

    def _finish(self, lease: DecodeLease, ending: Ending) -> None:
        self._send(lease, reports.finished(lease.order.key, ending, lease.kv_bytes))
        self._close(lease, ending=ending)

    def _fail(self, lease: DecodeLease, error: MeshfireError, *, retryable: bool) -> None:
        self._send(lease, reports.failed(lease.order.key, error, retryable=retryable))
        self._close(lease, error=error)

    def _close(self, lease: DecodeLease, *, ending: Ending | None = None, error: MeshfireError | None = None) -> None:
        """Free everything of a lease, at every hop; says nothing to the router."""
        self._table.remove(lease)
        if lease.preparing is not None:
            lease.preparing.cancel()
        self._release_kv(lease)
        self._experts.finish([lease.traceparent])
        end_lease_span(self._tracer, lease, ending, error)
        if not len(self._table):
            self._idle.set()
        self._settle()

    def _release_kv(self, lease: DecodeLease) -> None:
        """End the KV's lease at both ends, once; the owner hears whether it was read."""
        reading = lease.reading
        if reading is None or reading.released:
            return
        reading.advance(kv_lease.Released)
        release = self._reader.release(reading.source, acknowledged=reading.acknowledged)
        self._spawn(release, f"release-kv {lease.order.key.request_id}")

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        if self._group is None:
            work.close()
        else:
            self._group.create_task(work, name=name)

    def _send(self, lease: DecodeLease, message: pb.WorkRequest) -> None:
        if self._link is not None:
            self._link.send(lease.order.key.router_id, message)

    # --- loops --------------------------------------------------------------------------------------------------------

    async def _keep_deadlines(self) -> None:
        while True:
            self._arrival.clear()
            for lease in self._table:
                if remaining_s(lease) <= 0:
                    error = DeadlineExceeded("the request's deadline passed during decode")
                    self._fail(lease, error, retryable=False)
            nearest = min((remaining_s(lease) for lease in self._table), default=None)
            try:
                async with asyncio.timeout(nearest):
                    await self._arrival.wait()
            except TimeoutError:
                continue

    async def _keep_stepping(self) -> None:
        while True:
            await self._work.wait()
            for lease in self._table.grow():
                lease.preempted()
                self._instruments.preempted()
            parts = self._table.next_parts()
            if parts:
                await self._stepper.step(parts, self)
                self._settle()
            else:
                self._work.clear()

    # --- StepOutcome --------------------------------------------------------------------------------------------------

    async def on_results(self, results: Sequence[PartResult]) -> None:
        """Take the tokens into their sequences, tell the routers, end what is complete."""
        for one in results:
            if one.sampled:
                await self._rehearse(one.lease)
        taken = [take(one) for one in results if not one.lease.ended]
        for done in taken:
            self._table.scheduler.computed(done.result.lease.sequence, done.num_computed_tokens)
            self._tell_prompt(done.result)
        if self._link is not None:
            new = [done.new for done in taken if done.new is not None]
            for router_id, message in reports.progress_by_router(new).items():
                self._link.send(router_id, message)
        for done in taken:
            if done.ending is not None:
                self._finish(done.result.lease, done.ending)

    def _tell_prompt(self, result: PartResult) -> None:
        """What is to be told of a prompt that is computed here: its scores, and that it is done."""
        lease, key = result.lease, result.lease.order.key
        for message in prompt_logprobs.messages_of(key, result.part.start + 1, result.scores):
            self._send(lease, message)
        if lease.reading is None and lease.prompt_computed and not lease.prompt_told:
            lease.prompt_told = True
            self._send(lease, reports.prompt_computed(key, lease.num_cached_tokens or 0))

    def on_failure(self, lease: DecodeLease, error: MeshfireError) -> None:
        """Give it back."""
        self._fail(lease, error, retryable=error.retryable)

    async def _rehearse(self, lease: DecodeLease) -> None:
        """Test hook: the lease's own fault, right before its token is sent."""
        fault = lease.order.fault
        if fault is None or lease.struck or not fault.aims_at("decode", self._identity.instance_id):
            return
        if fault.strikes(token=lease.sequence.num_output_tokens):
            lease.struck = True
            await strike(fault)
