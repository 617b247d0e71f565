"""The decode engine: leases in, tokens out.

    lease ──▶ waiting ──blocks──▶ reading KV ──verified──▶ running ──▶ finished | failed
                  cancel, deadline, lost router, preemption: from anywhere, within one step

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
from meshfire.errors import DeadlineExceeded, Draining, InternalError, MeshfireError, NoFreeBlocks
from meshfire.kv import lease as kv_lease
from meshfire.model.interface import KvGeometry
from meshfire.model.sampling import Sampled
from meshfire.telemetry import names
from meshfire.telemetry.spans import span
from meshfire.worker.faults import strike
from meshfire.worker.ports import Experts, Link
from services.decode import reports, wire
from services.decode.ending import Ending
from services.decode.instruments import DecodeInstruments
from services.decode.lease import DecodeLease, new_lease, remaining_s
from services.decode.order import Order
from services.decode.ports import Reader
from services.decode.rules import RuleBook
from services.decode.stepper import Stepper
from services.decode.table import LeaseTable
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
        ending = order.limits.ending_before(lease.sequence.num_output_tokens, lease.sequence.num_tokens)
        if ending is not None:  # only the word that all is done was lost
            self._finish(lease, ending)

    def _settle(self) -> None:
        """After any change of who is here: admit who fits, and say how much room is left."""
        if self._group is None or self._link is None:
            return
        for lease in self._table.admit():
            name = f"read-kv {lease.order.key.request_id}"
            lease.read_task = self._group.create_task(self._prepare(lease), name=name)
        scheduler = self._table.scheduler
        self._link.set_credit(0 if self._draining else max(0, scheduler.num_slots), scheduler.num_spare_blocks)

    async def _prepare(self, lease: DecodeLease) -> None:
        """Open its rule, then read its KV: others step meanwhile."""
        order = lease.order
        if order.rule is not None:
            scripted = order.limits.script is not None
            try:
                lease.ruler = await self._rules.open(order.rule, in_reasoning=order.in_reasoning, may_break=scripted)
            except MeshfireError as error:
                lease.read_task = None
                self._fail(lease, error, retryable=error.retryable)
                return
        await self._read(lease)

    async def _read(self, lease: DecodeLease) -> None:
        sequence = lease.sequence
        attributes = {
            names.ATTR_KV_BLOCKS: len(sequence.block_table),
            names.ATTR_KV_BLOCKS_REUSED: sequence.num_held_blocks,
        }
        parent = lease.traceparent
        lease.advance_kv(kv_lease.ReadStarted)
        try:
            with span(self._tracer, names.SPAN_DECODE_READ_KV, parent=parent, attributes=attributes) as read_span:
                read = await self._reader.read(
                    lease.order.source, lease.manifest, sequence.block_table, sequence.num_held_blocks
                )
                read_span.set_attribute(names.ATTR_KV_BYTES, read.num_bytes)
        except Exception as error:
            lease.read_task = None
            lease.advance_kv(kv_lease.ReadAborted)
            self._read_failed(lease, error)
            return
        lease.read_task = None
        lease.arrived(read.last_hidden, read.num_bytes)
        self._instruments.kv_read(read.num_bytes)
        self._table.scheduler.start(sequence)
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
        if lease.read_task is not None:
            lease.read_task.cancel()
        self._release_kv(lease)
        self._experts.finish([lease.traceparent])
        end_lease_span(self._tracer, lease, ending, error)
        if not len(self._table):
            self._idle.set()
        self._settle()

    def _release_kv(self, lease: DecodeLease) -> None:
        """End the KV's lease at both ends, once; the owner hears whether it was read."""
        if lease.kv.released:
            return
        lease.advance_kv(kv_lease.Released)
        acknowledged = lease.kv.outcome is kv_lease.Outcome.ACKNOWLEDGED
        release = self._reader.release(lease.order.source, acknowledged=acknowledged)
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
                self._instruments.preempted()
                self._fail(lease, NoFreeBlocks("preempted: older sequences need its KV blocks"), retryable=True)
            leases = self._table.running()
            if leases:
                await self._stepper.step(leases, self)
                self._settle()
            else:
                self._work.clear()

    # --- StepOutcome --------------------------------------------------------------------------------------------------

    async def on_tokens(self, chosen: Sequence[tuple[DecodeLease, Sampled]]) -> None:
        """Take the tokens into their sequences, tell the routers, end what is complete."""
        for lease, _ in chosen:
            await self._rehearse(lease)
        alive = [(lease, sampled) for lease, sampled in chosen if not lease.ended]
        taken = [(lease, *_take(lease, sampled)) for lease, sampled in alive]
        if self._link is not None:
            tokens = [token for _, token, _ in taken if token is not None]
            for router_id, message in reports.progress_by_router(tokens).items():
                self._link.send(router_id, message)
        for lease, _, ending in taken:
            if ending is not None:
                self._finish(lease, ending)

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


def _take(lease: DecodeLease, sampled: Sampled) -> tuple[reports.NewToken | None, Ending | None]:
    """Append the token, unless it is an end token; what to report, and the end of the output."""
    sequence, limits = lease.sequence, lease.order.limits
    index = sequence.num_output_tokens
    ending = limits.ending_with(index, sampled.token_id)
    if ending is not None:
        return None, ending
    sequence.append(sampled.token_id)
    token = reports.NewToken(lease.order, index, sampled)
    return token, limits.ending_before(sequence.num_output_tokens, sequence.num_tokens)
