"""One span per trace and stream, however many hops it makes.

Owns when a trace's span begins and ends: first hop, and last hop seen before the caller closes it, falls silent or goes
away. Knows nothing of computing. Each book belongs to one thread: a stream's to the event loop, a lane's to the
compute thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.trace import Span, SpanKind, Tracer

from meshfire.telemetry import names
from meshfire.telemetry.spans import start_span
from services.expert_shard.forwarder import HopCost


@dataclass
class _Trace:
    span: Span
    last_ns: int = 0
    hops: int = 0
    tokens: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    queue_ns: int = 0
    compute_ns: int = 0


class SpanBook:
    """The open traces of one stream or lane. A step of several requests counts whole in each of their spans."""

    def __init__(self, tracer: Tracer, shard_id: str, caller_id: str) -> None:
        self._tracer = tracer
        self._attributes = {names.ATTR_SHARD_ID: shard_id, names.ATTR_CALLER_ID: caller_id}
        self._open: dict[str, _Trace] = {}

    def record(self, traceparents: Sequence[str], cost: HopCost) -> None:
        """One answered hop."""
        if not traceparents:
            return
        now_ns = time.time_ns()
        began_ns = now_ns - cost.compute_ns - cost.queue_ns
        for traceparent in traceparents:
            trace = self._open.get(traceparent) or self._begin(traceparent, began_ns)
            trace.last_ns = now_ns
            trace.hops += 1
            trace.tokens += cost.tokens
            trace.bytes_in += cost.bytes_in
            trace.bytes_out += cost.bytes_out
            trace.queue_ns += cost.queue_ns
            trace.compute_ns += cost.compute_ns

    def finish(self, traceparents: Sequence[str]) -> None:
        """The caller says that these make no more hops. Unknown ones made none here."""
        for traceparent in traceparents:
            trace = self._open.pop(traceparent, None)
            if trace is not None:
                _end(trace)

    def sweep(self, silence_s: float) -> None:
        """Close what made no hop for so long; a later hop opens another span of the same trace."""
        before_ns = time.time_ns() - int(silence_s * 1e9)
        self.finish([traceparent for traceparent, trace in self._open.items() if trace.last_ns < before_ns])

    def close(self) -> None:
        """The stream is over."""
        self.finish(list(self._open))

    def _begin(self, traceparent: str, began_ns: int) -> _Trace:
        span = start_span(
            self._tracer,
            names.SPAN_EXPERT_FORWARD,
            parent=traceparent,
            attributes=self._attributes,
            kind=SpanKind.SERVER,
            start_time_ns=began_ns,
        )
        self._open[traceparent] = trace = _Trace(span)
        return trace


def _end(trace: _Trace) -> None:
    trace.span.set_attributes(
        {
            names.ATTR_EXPERT_HOPS: trace.hops,
            names.ATTR_EXPERT_TOKENS: trace.tokens,
            names.ATTR_EXPERT_BYTES_IN: trace.bytes_in,
            names.ATTR_EXPERT_BYTES_OUT: trace.bytes_out,
            names.ATTR_EXPERT_QUEUE_MS: trace.queue_ns / 1e6,
            names.ATTR_EXPERT_COMPUTE_MS: trace.compute_ns / 1e6,
        }
    )
    trace.span.end(trace.last_ns)
