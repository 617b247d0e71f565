"""Drives one request from the call to its last message: admit, lease, detokenise, tell.

Owns the order of the steps and the deadline. Where work goes and what a failure means is decided elsewhere
(placement.py, lifecycle.py); this file waits for tokens and turns them into messages.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from opentelemetry.trace import Span, SpanKind

from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as tokenizer_pb
from meshfire.errors import Cancelled, DeadlineExceeded, MeshfireError
from meshfire.metering.prices import PriceTable
from meshfire.telemetry import names, spans
from services.router import lifecycle_events as ev
from services.router import wire
from services.router.account import Account
from services.router.active import ActiveRequest, Timing
from services.router.admission import Admission, Call
from services.router.books import Books, NoBooks
from services.router.instruments import Instruments
from services.router.models import facts_of, no_worker
from services.router.output import FinishReason, OutputToken
from services.router.prompt_echo import prompt_parts
from services.router.text_stream import TextStream
from services.router.tracing import RequestTrace
from services.router.validation import wants_prompt

Emit = Callable[[pb.GenerateResponse], Awaitable[None]]


@dataclass(frozen=True)
class Parts:
    """What every request shares."""

    admission: Admission
    instruments: Instruments
    timing: Timing
    prices: PriceTable = field(default_factory=PriceTable)
    books: Books = field(default_factory=NoBooks)


async def generate(parts: Parts, call: Call, emit: Emit) -> None:
    """Serve one call. Raises the MeshfireError that ended it; in any case the workers are told to free their part."""
    request_id = uuid.uuid4().hex
    with spans.span(
        parts.admission.tracer,
        names.SPAN_ROUTER_GENERATE,
        parent=call.traceparent,
        attributes={names.ATTR_REQUEST_ID: request_id, names.ATTR_MODEL: call.request.model},
        kind=SpanKind.SERVER,
    ) as span:
        await _Generation(parts, call, emit, request_id, span).run()


class _Generation:
    def __init__(self, parts: Parts, call: Call, emit: Emit, request_id: str, span: Span) -> None:
        self._parts = parts
        self._call = call
        self._emit = emit
        self._request_id = request_id
        self._span = span
        self._account = Account(parts.instruments, call.request.model, call.payer, parts.prices)
        self._active: ActiveRequest | None = None
        self._prompt_due = wants_prompt(call.request)
        self._made_calls = False

    async def run(self) -> None:
        outcome = Cancelled.reason
        try:
            outcome = (await self._run_in_time()).value
        except MeshfireError as error:
            outcome = error.reason
            raise
        finally:
            if self._active is not None:
                self._active.handle(ev.ClientGone(Cancelled("the caller went away")))
                self._settle(self._active, outcome)
            self._account.close(outcome)

    def _settle(self, active: ActiveRequest, outcome: str) -> None:
        line = self._account.line(active, outcome, spans.trace_id_of(self._span), time.time())
        self._account.describe(active, self._span, line)
        if line is not None:
            self._parts.books.enter(line)

    async def _run_in_time(self) -> FinishReason:
        try:
            async with asyncio.timeout_at(self._call.deadline_s):
                self._active = await self._admit()
                return await self._stream(self._active)
        except TimeoutError:
            raise self._late() from None

    def _late(self) -> MeshfireError:
        """Why the deadline passed: the last failure, a missing worker, or nothing but time."""
        workers, model = self._parts.admission.desk.workers, self._call.request.model
        if self._active is None:
            return DeadlineExceeded("the deadline passed before the request was admitted and encoded")
        error: MeshfireError = DeadlineExceeded("the request's deadline passed")
        if facts_of(workers, model) is None:
            error = no_worker(workers, model)
        self._active.handle(ev.DeadlinePassed(error))
        assert self._active.ending is not None
        return self._active.ending.error or error

    async def _admit(self) -> ActiveRequest:
        instruments, admission = self._parts.instruments, self._parts.admission
        try:
            work = await admission.admit(self._request_id, self._call, self._span)
        except MeshfireError as error:
            instruments.refused.add(1, {names.ATTR_ERROR_REASON: error.reason})
            raise
        self._account.admitted(len(work.prompt))
        self._span.set_attribute(names.ATTR_TOKENS_PROMPT, len(work.prompt))
        trace = RequestTrace(admission.tracer, self._span, instruments, work.model, work.outlook)
        return ActiveRequest(work, admission.desk, self._parts.timing, trace)

    async def _stream(self, active: ActiveRequest) -> FinishReason:
        request = self._call.request
        start = tokenizer_pb.DetokenizeStart(
            model=request.model,
            stop=request.sampling.stop,
            keep_special_tokens=request.keep_special_tokens,
            output=active.work.output,
        )
        text = TextStream(self._parts.admission.tokenizers, start, spans.traceparent_of(self._span))
        active.start()
        try:
            await self._emit(self._started(active))
            reason = await self._follow(active, text)
            await text.finish()
            return reason
        finally:
            text.close()

    def _started(self, active: ActiveRequest) -> pb.GenerateResponse:
        started = pb.GenerateStarted(
            request_id=self._request_id,
            trace_id=spans.trace_id_of(self._span),
            num_prompt_tokens=len(active.work.prompt),
            seed=active.work.sampling.seed,
        )
        if self._call.request.return_prompt_token_ids:
            started.prompt_token_ids.extend(active.work.prompt)
        return pb.GenerateResponse(started=started)

    async def _follow(self, active: ActiveRequest, text: TextStream) -> FinishReason:
        """Hand out tokens, then the last message."""
        while True:
            tokens, ending = await active.outcome()
            error = ending.error if ending is not None else None
            if tokens or error is None:
                await self._tell_prompt(active)
                stop_hit = await self._hand_out(tokens, text, last=ending is not None and error is None)
                if stop_hit is not None:
                    active.handle(ev.StopTextFound())
                    return await self._finish(active, FinishReason.STOP, stop_hit=stop_hit)
            if error is not None:
                raise error
            if ending is not None:
                return await self._finish(active, ending.reason, stop_token_id=ending.stop_token_id)

    async def _tell_prompt(self, active: ActiveRequest) -> None:
        """Once, if it was asked for, before the first token: its log-probabilities are complete by then."""
        if not self._prompt_due:
            return
        self._prompt_due = False
        tokenizers, prompt = self._parts.admission.tokenizers, active.work.prompt
        traceparent = spans.traceparent_of(self._span)
        parts = prompt_parts(tokenizers, self._call.request, prompt, active.prompt_logprobs, traceparent)
        async with aclosing(parts):
            async for part in parts:
                await self._emit(part)

    async def _hand_out(self, tokens: Sequence[OutputToken], text: TextStream, *, last: bool) -> str | None:
        """One delta; returns the stop text if one was completed. What comes after it is cut."""
        lookup = _ids_with_logprobs(tokens)
        piece = await text.feed([token.token_id for token in tokens], last=last, lookup_ids=lookup)
        used = tokens if piece.stop_hit is None else tokens[: piece.num_tokens_used]
        if used or piece.text or piece.events:
            self._account.handed_out(len(used), piece.num_reasoning_tokens)
            self._made_calls |= any(event.HasField("call_begin") for event in piece.events)
            await self._emit(wire.delta_to(piece.text, used, dict(zip(lookup, piece.pieces)), piece.events))
        return piece.stop_hit

    async def _finish(
        self,
        active: ActiveRequest,
        reason: FinishReason | None,
        *,
        stop_hit: str | None = None,
        stop_token_id: int | None = None,
    ) -> FinishReason:
        assert reason is not None, "an end without an error has a reason"
        if self._made_calls and reason is FinishReason.STOP and stop_hit is None:
            reason = FinishReason.TOOL_CALLS
        self._span.set_attribute(names.ATTR_FINISH_REASON, reason.value)
        finished = self._account.finish(active, reason, stop_hit, stop_token_id)
        await self._emit(pb.GenerateResponse(finished=finished))
        return reason


def _ids_with_logprobs(tokens: Sequence[OutputToken]) -> list[int]:
    """Ids whose bytes a delta needs, each once."""
    found: dict[int, None] = {}
    for token in tokens:
        if token.logprobs is not None:
            found.update(dict.fromkeys((token.token_id, *token.logprobs.top_ids)))
    return list(found)
