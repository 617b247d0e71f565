"""What a lease leaves on its request's trace: `decode.lease`, and below it `decode.read_kv` and `decode.steps`."""

from __future__ import annotations

from opentelemetry.trace import Span, Tracer

from meshfire.errors import MeshfireError
from meshfire.telemetry import names
from meshfire.telemetry.spans import mark_failed, start_span
from services.decode.ending import Ending
from services.decode.lease import DecodeLease
from services.decode.order import Order


def start_lease_span(tracer: Tracer, order: Order, worker_id: str, model: str) -> Span:
    """Below the router's span."""
    attributes: dict[str, str | int] = {
        names.ATTR_REQUEST_ID: order.key.request_id,
        names.ATTR_EPOCH: order.key.epoch,
        names.ATTR_WORKER_ID: worker_id,
        names.ATTR_MODEL: model,
        names.ATTR_TOKENS_PROMPT: order.num_prompt_tokens,
    }
    if order.source is not None:
        attributes[names.ATTR_KV_LEASE_ID] = order.source.kv_lease_id
    return start_span(tracer, names.SPAN_DECODE_LEASE, parent=order.traceparent, attributes=attributes)


def end_lease_span(tracer: Tracer, lease: DecodeLease, ending: Ending | None, error: MeshfireError | None) -> None:
    """End it with what the lease took; a cancelled one has neither ending nor error."""
    span = lease.span
    num_tokens = lease.sequence.num_tokens - len(lease.order.token_ids)
    span.set_attribute(names.ATTR_TOKENS_OUTPUT, num_tokens)
    span.set_attribute(names.ATTR_KV_BYTES, lease.kv_bytes)
    span.set_attribute(names.ATTR_STEPS, lease.num_steps)
    span.set_attribute(names.ATTR_PREEMPTIONS, lease.num_preemptions)
    if lease.reading is None and lease.num_cached_tokens is not None:
        span.set_attribute(names.ATTR_TOKENS_CACHED, lease.num_cached_tokens)
    if ending is not None:
        span.set_attribute(names.ATTR_FINISH_REASON, ending.reason.value)
    if error is not None:
        mark_failed(span, error)
    if lease.num_steps:
        _steps_span(tracer, lease, num_tokens)
    span.end()


def _steps_span(tracer: Tracer, lease: DecodeLease, num_tokens: int) -> None:
    attributes = {
        names.ATTR_STEPS: lease.num_steps,
        names.ATTR_BATCH_MEAN: lease.batch_total / lease.num_steps,
        names.ATTR_TOKENS_OUTPUT: num_tokens,
    }
    steps = start_span(
        tracer,
        names.SPAN_DECODE_STEPS,
        parent=lease.traceparent,
        attributes=attributes,
        start_time_ns=lease.first_step_ns,
    )
    for shard_id, stats in lease.shards.items():
        steps.add_event(
            names.EVENT_EXPERT_SHARD,
            {
                names.ATTR_SHARD_ID: shard_id,
                names.ATTR_EXPERT_HOPS: stats.hops,
                names.ATTR_EXPERT_TOKENS: stats.tokens,
                names.ATTR_EXPERT_BYTES_OUT: stats.bytes_out,
                names.ATTR_EXPERT_BYTES_IN: stats.bytes_in,
                names.ATTR_EXPERT_WAIT_MS: stats.wait_ns / 1e6,
                names.ATTR_EXPERT_QUEUE_MS: stats.queue_ns / 1e6,
                names.ATTR_EXPERT_COMPUTE_MS: stats.compute_ns / 1e6,
            },
        )
    steps.end()
