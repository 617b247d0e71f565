"""What one request took: tokens, times, workers, money; for its last message, its span, the metrics and the ledger."""

from __future__ import annotations

import asyncio

from opentelemetry.trace import Span

from meshfire.api.router.v1 import inference_service_pb2 as pb
from meshfire.metering.prices import PriceTable
from meshfire.store.ledger import Line
from meshfire.telemetry import names
from services.router import wire
from services.router.active import ActiveRequest
from services.router.billing import Bill, Payer, bill_for, is_billed
from services.router.instruments import Instruments
from services.router.lifecycle_events import Stage
from services.router.output import FinishReason

#: outcomes that cost their prompt even without a token of output
_COMPLETE = {reason.value for reason in FinishReason}


class Account:
    """One per request, from its call to its end."""

    def __init__(self, instruments: Instruments, model: str, payer: Payer, prices: PriceTable) -> None:
        self._instruments = instruments
        self._model = model
        self._payer = payer
        self._prices = prices
        self._now = asyncio.get_running_loop().time
        self._began_s = self._now()
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._num_output_tokens = 0
        self._num_reasoning_tokens = 0
        #: 1 if the output ended with an end token, which is in no delta
        self._num_end_tokens = 0
        instruments.active.add(1)

    def admitted(self, num_prompt_tokens: int) -> None:
        """The request waits for its first lease."""
        self._instruments.tokens_prompt.add(num_prompt_tokens, {names.ATTR_MODEL: self._model})

    def handed_out(self, num_tokens: int, num_reasoning_tokens: int = 0) -> None:
        """Tokens went to the client; some of them were reasoning."""
        self._num_reasoning_tokens += num_reasoning_tokens
        if num_tokens == 0:
            return
        self._last_token_s = self._now()
        if self._first_token_s is None:
            self._first_token_s = self._last_token_s
            waited_s = self._first_token_s - self._began_s
            self._instruments.time_to_first_token.record(waited_s, {names.ATTR_GEN_AI_MODEL: self._model})
        self._num_output_tokens += num_tokens

    def finish(
        self, active: ActiveRequest, reason: FinishReason, stop_hit: str | None, stop_token_id: int | None
    ) -> pb.GenerateFinished:
        """The last message. An end token counts, though it has no text and is in no delta."""
        self._num_end_tokens = 0 if stop_token_id is None else 1
        usage = self._usage(active)
        usage.micro_neurons = self._bill(usage).micro_neurons
        return pb.GenerateFinished(
            finish_reason=wire.reason_to(reason),
            stop_hit=stop_hit,
            stop_token_id=stop_token_id,
            usage=usage,
            receipt=receipt_of(active),
        )

    def line(self, active: ActiveRequest, outcome: str, trace_id: str, ended_at: float) -> Line | None:
        """For the ledger; None if nothing is billed. `ended_at` in seconds since 1970."""
        usage = self._usage(active)
        if not is_billed(outcome) or not (usage.num_output_tokens or outcome in _COMPLETE):
            return None
        bill = self._bill(usage)
        return Line(
            request_id=active.work.request_id,
            account_id=self._payer.account_id,
            key_id=self._payer.key_id,
            model=self._model,
            ended_at=ended_at,
            outcome=outcome,
            tokens=bill.tokens,
            reasoning_tokens=bill.reasoning_tokens,
            micro_neurons=bill.micro_neurons,
            trace_id=trace_id,
        )

    def _usage(self, active: ActiveRequest) -> pb.Usage:
        num_prompt_tokens = len(active.work.prompt)
        return pb.Usage(
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=min(_num_cached(active), num_prompt_tokens),
            num_output_tokens=self._num_billed_tokens,
            num_reasoning_tokens=min(self._num_reasoning_tokens, self._num_billed_tokens),
        )

    def _bill(self, usage: pb.Usage) -> Bill:
        return bill_for(usage, self._payer, self._model, self._prices)

    @property
    def _num_billed_tokens(self) -> int:
        """As in usage: what a span says must add up to what was answered."""
        return self._num_output_tokens + self._num_end_tokens

    def describe(self, active: ActiveRequest, span: Span, line: Line | None) -> None:
        """Onto the request's span: with it and the price table the ledger can be computed anew."""
        receipt = receipt_of(active)
        if line is not None:
            span.set_attribute(names.ATTR_ACCOUNT_ID, line.account_id)
            span.set_attribute(names.ATTR_TOKENS_BILLED_PROMPT, line.tokens.prompt)
            span.set_attribute(names.ATTR_TOKENS_BILLED_CACHED, line.tokens.cached)
            span.set_attribute(names.ATTR_TOKENS_REASONING, line.reasoning_tokens)
            span.set_attribute(names.ATTR_MICRO_NEURONS, line.micro_neurons)
        span.set_attribute(names.ATTR_TOKENS_OUTPUT, self._num_billed_tokens)
        span.set_attribute(names.ATTR_TOKENS_CACHED, _num_cached(active))
        span.set_attribute(names.ATTR_ATTEMPT, active.life.epoch)
        span.set_attribute(names.ATTR_KV_BYTES, receipt.kv_bytes)
        span.set_attribute(names.ATTR_QUEUE_WAIT_MS, receipt.queue_ms)
        span.set_attribute(names.ATTR_PLACEMENT, receipt.placement)
        span.set_attribute(names.ATTR_TOKENS_CACHED_EXPECTED, receipt.num_cached_expected)
        span.set_attribute(names.ATTR_WORKER_ID, [facts.worker_id for facts in active.workers.values()])

    def close(self, outcome: str) -> None:
        """The call is over; `outcome` is a finish reason or an error's reason."""
        instruments, model = self._instruments, {names.ATTR_GEN_AI_MODEL: self._model}
        instruments.active.add(-1)
        # Without the model: a caller could make up as many names as it likes.
        instruments.duration.record(self._now() - self._began_s, {names.ATTR_FINISH_REASON: outcome})
        if self._num_billed_tokens:
            instruments.tokens_output.add(self._num_billed_tokens, {names.ATTR_MODEL: self._model})
        if self._num_output_tokens > 1 and self._first_token_s is not None and self._last_token_s is not None:
            mean_s = (self._last_token_s - self._first_token_s) / (self._num_output_tokens - 1)
            instruments.time_per_output_token.record(mean_s, model)


def receipt_of(active: ActiveRequest) -> pb.RoutingReceipt:
    """Who did the work."""
    kv_bytes = active.ending.kv_bytes if active.ending is not None else None
    if kv_bytes is None:
        # A cancelled decode worker does not say what it read: at most all that was offered.
        kv_bytes = active.last_offer.num_bytes if active.last_offer is not None else 0
    workers = {stage: facts.worker_id for stage, facts in active.workers.items()}
    return pb.RoutingReceipt(
        prefill_worker_id=workers.get(Stage.PREFILL, ""),
        decode_worker_id=workers.get(Stage.DECODE, ""),
        num_failovers=active.life.num_failures,
        queue_ms=round(active.queue_s * 1000),
        kv_bytes=kv_bytes,
        placement=active.first_prefill.reason if active.first_prefill is not None else "",
        num_cached_expected=active.first_prefill.num_cached_expected if active.first_prefill is not None else 0,
        predicted_queue_ms=round(active.work.outlook.wait_s * 1000),
    )


def _num_cached(active: ActiveRequest) -> int:
    """As the first epoch found it: a later one would count this very request's own blocks as cached."""
    return active.num_cached or 0
