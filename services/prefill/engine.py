"""Leases in, offers or failures out: the life of every prompt of this worker.

Owns admission, credit, cancel and drain. How a prompt is computed is `prompt_pass`'s, how its KV is fetched `shelf`'s.
Implements `meshfire.worker.link.LeaseHandler`; one task per lease, at most `max_leases` of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry.trace import Span, SpanKind

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.errors import Cancelled, Draining, InternalError, MeshfireError, QueueFull, Unavailable
from meshfire.telemetry import names
from meshfire.telemetry.spans import span
from meshfire.worker import prompt_logprobs
from meshfire.worker.lease_key import LeaseKey
from meshfire.worker.link import failure_of
from meshfire.worker.ports import Link
from services.prefill import wire
from services.prefill.prompt import Prefilled, Prompt, PromptLimits, Stop
from services.prefill.prompt_pass import PromptPass
from services.prefill.shelf import KvShelf

log = logging.getLogger(__name__)

#: A chunk that waits for a frozen shard ends only when the experts are closed, which is what follows.
_CLOSE_S = 2.0


@dataclass(frozen=True)
class Admission:
    """What this worker takes."""

    limits: PromptLimits
    max_leases: int
    hooks_on: bool


class PrefillEngine:
    """All prompts under way. `attach` gives it the link before the first lease."""

    def __init__(self, admission: Admission, prompt_pass: PromptPass, shelf: KvShelf, tasks: asyncio.TaskGroup) -> None:
        self._admission = admission
        self._pass = prompt_pass
        self._shelf = shelf
        self._tasks = tasks
        self._link: Link | None = None
        self._running: dict[LeaseKey, Stop] = {}
        self._pending_tokens: dict[LeaseKey, int] = {}
        self._draining = False
        #: set while no prompt is under way
        self.idle = asyncio.Event()
        self.idle.set()

    def attach(self, link: Link) -> None:
        """The way out, made after the engine because it calls the engine."""
        self._link = link
        self.update_credit()

    def update_credit(self) -> None:
        """Tell the routers how much room there is now."""
        num_slots = 0 if self._draining else self._admission.max_leases - len(self._running)
        if self._link is not None:
            self._link.set_credit(num_slots, self._pass.pool.num_free, sum(self._pending_tokens.values()))

    def on_lease(self, router_id: str, lease: pb.Lease) -> None:
        """Start a prompt. Raises Draining, QueueFull, InvalidPrompt, PromptTooLong, TestHooksOff, BadInput."""
        prompt = wire.prompt_from(router_id, lease, hooks_on=self._admission.hooks_on)
        if prompt.key in self._running:
            return  # a doubled message
        self._check_room()
        self._admission.limits.check(prompt.token_ids)
        stop = self._running[prompt.key] = Stop(prompt.deadline)
        # What its prefix saves is known only later: until then the whole prompt counts.
        self._pending_tokens[prompt.key] = len(prompt.token_ids)
        self.idle.clear()
        self.update_credit()
        self._tasks.create_task(self._serve(prompt, stop), name=f"prefill {prompt.key.request_id}")

    def on_cancel(self, router_id: str, request_id: str, epoch: int) -> None:
        """Stop work on a request, and withdraw its offered KV."""
        self._stop(
            lambda key: key.cancelled_by(router_id, request_id, epoch), Cancelled("the router cancelled the request")
        )

    def on_router_lost(self, router_id: str) -> None:
        """Nobody waits for this router's prompts any more."""
        self._stop(lambda key: key.router_id == router_id, Cancelled("the router's stream ended"))

    def on_kv_grant(self, router_id: str, grant: pb.KvGrant) -> None:
        """Name the reader of an offered KV. A grant that comes too late or twice is only noted: the reader is told."""
        try:
            self._shelf.grant(grant.kv_lease_id, grant.epoch, grant.reader_id)
        except MeshfireError as error:
            log.info("grant of router %s: %s", router_id, error)

    async def drain(self) -> None:
        """Take nothing new; return when all prompts are done and all offered KV was fetched or expired."""
        self._draining = True
        self.update_credit()
        await self.idle.wait()
        await self._shelf.empty.wait()

    async def close(self) -> None:
        """Give up what is under way. Each prompt ends after the chunk that it computes, unless that chunk is stuck."""
        self._draining = True
        self._stop(lambda _: True, Unavailable("the prefill worker was stopped"))
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.idle.wait()
        except TimeoutError:
            log.warning("%d prompts did not end within %.0f s", len(self._running), _CLOSE_S)

    def _check_room(self) -> None:
        if self._draining:
            raise Draining("this prefill worker stops and takes no new prompts")
        if len(self._running) >= self._admission.max_leases:
            raise QueueFull(f"{len(self._running)} prompts are under way, which is all this worker takes at once")

    def _stop(self, wanted: Callable[[LeaseKey], bool], error: MeshfireError) -> None:
        for key, stop in self._running.items():
            if wanted(key):
                stop.set(error)
        self._shelf.withdraw(lambda prompt: wanted(prompt.key))

    async def _serve(self, prompt: Prompt, stop: Stop) -> None:
        try:
            for message in await self._answer(prompt, stop):
                self._send(prompt, message)
        finally:
            del self._running[prompt.key]
            del self._pending_tokens[prompt.key]
            if not self._running:
                self.idle.set()
            self.update_credit()

    async def _answer(self, prompt: Prompt, stop: Stop) -> list[pb.WorkRequest]:
        """What the router is told; nothing for a cancelled lease, which is not answered."""
        try:
            return await self._offer(prompt, stop)
        except Cancelled:
            return []
        except MeshfireError as error:
            return [_failed(prompt, error)]
        except Exception:
            log.exception("prompt %s epoch %d", prompt.key.request_id, prompt.key.epoch)
            return [_failed(prompt, InternalError("the prefill worker failed; its log says why"))]

    async def _offer(self, prompt: Prompt, stop: Stop) -> list[pb.WorkRequest]:
        attributes: dict[str, str | int] = {
            names.ATTR_REQUEST_ID: prompt.key.request_id,
            names.ATTR_EPOCH: prompt.key.epoch,
            names.ATTR_TOKENS_PROMPT: len(prompt.token_ids),
        }
        with span(
            self._pass.tracer,
            names.SPAN_PREFILL_LEASE,
            parent=prompt.traceparent,
            attributes=attributes,
            kind=SpanKind.CONSUMER,
        ) as lease_span:
            prefilled = await self._pass.run(prompt, stop, lease_span)
            lease = self._shelf.offer(prompt, prefilled)
            _describe(lease_span, prefilled, lease.lease_id)
        self._pass.instruments.prefix_reused(prefilled.num_cached_tokens)
        return [
            *prompt_logprobs.messages_of(prompt.key, 1, prefilled.logprobs),
            wire.offer_of(prompt, prefilled, lease),
        ]

    def _send(self, prompt: Prompt, message: pb.WorkRequest) -> None:
        if self._link is not None:
            self._link.send(prompt.key.router_id, message)


def _failed(prompt: Prompt, error: MeshfireError) -> pb.WorkRequest:
    return pb.WorkRequest(failed=failure_of(prompt.key.request_id, prompt.key.epoch, error))


def _describe(lease_span: Span, prefilled: Prefilled, lease_id: str) -> None:
    lease_span.set_attributes(
        {
            names.ATTR_TOKENS_CACHED: prefilled.num_cached_tokens,
            names.ATTR_KV_BYTES: prefilled.num_bytes,
            names.ATTR_KV_BLOCKS: len(prefilled.blocks),
            names.ATTR_KV_LEASE_ID: lease_id,
        }
    )
