"""What the gateway records of a generating request: one span, two metrics, one log line. Knows no dialect."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.metrics import Meter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from meshfire.telemetry import names
from meshfire.telemetry.spans import start_span, trace_id_of, traceparent_of
from services.gateway.errors import HttpError
from services.gateway.outputs import Output, total

log = logging.getLogger(__name__)

#: nginx' status for a client that closed the connection; only recorded, never sent
CLIENT_GONE_STATUS = 499
#: Names come from callers and may be of any length.
MAX_MODEL_CHARS = 200

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass
class Seen:
    """One request as it is observed."""

    span: Span
    #: The gateway's own id until the router has given one.
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    #: What the client was told. Until then, the worst.
    status: int = 500
    reason: str = ""
    outputs: Sequence[Output] = ()

    @property
    def traceparent(self) -> str:
        """For the calls of this request."""
        return traceparent_of(self.span)

    def headers(self) -> Mapping[str, str]:
        """By which the client can name this request."""
        trace_id = trace_id_of(self.span)
        return {"x-request-id": self.request_id} | ({"x-meshfire-trace-id": trace_id} if trace_id else {})

    def asked(self, model: str, *, stream: bool) -> None:
        """The request was understood."""
        self.span.set_attribute(names.ATTR_MODEL, model[:MAX_MODEL_CHARS])
        self.span.set_attribute(names.ATTR_STREAM, stream)

    def failed(self, error: HttpError) -> None:
        """It ends with an error, before or after the answer began."""
        self.reason = error.code or ""
        if error.status >= 500:
            self.span.set_status(Status(StatusCode.ERROR, error.message))

    def abandoned(self) -> None:
        """The client is gone."""
        self.status, self.reason = CLIENT_GONE_STATUS, "client_gone"

    def close(self) -> None:
        """End the span."""
        usage = total(self.outputs)
        self.span.set_attribute(names.ATTR_REQUEST_ID, self.request_id)
        self.span.set_attribute(names.ATTR_HTTP_STATUS, self.status)
        self.span.set_attribute(names.ATTR_TOKENS_PROMPT, usage.num_prompt_tokens)
        self.span.set_attribute(names.ATTR_TOKENS_CACHED, usage.num_cached_tokens)
        self.span.set_attribute(names.ATTR_TOKENS_OUTPUT, usage.num_output_tokens)
        if self.reason:
            self.span.set_attribute(names.ATTR_ERROR_REASON, self.reason)
        self.span.end()


class Observer:
    """Makes a `Seen` per request and the metrics from it."""

    def __init__(self, tracer: Tracer, meter: Meter) -> None:
        self._tracer = tracer
        self._duration = meter.create_histogram(
            names.METRIC_HTTP_DURATION,
            "s",
            "From the request to the end of its answer, by status",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._active = meter.create_up_down_counter(names.METRIC_HTTP_ACTIVE, "1", "Requests under way")

    @contextmanager
    def request(self, method: str, route: str, traceparent: str | None) -> Iterator[Seen]:
        """Observe the block as one request."""
        labels = {names.ATTR_HTTP_METHOD: method, names.ATTR_HTTP_ROUTE: route}
        span = start_span(
            self._tracer, names.SPAN_GATEWAY_REQUEST, parent=traceparent, attributes=labels, kind=SpanKind.SERVER
        )
        seen, started = Seen(span), time.perf_counter()
        self._active.add(1, labels)
        try:
            yield seen
        finally:
            took_s = time.perf_counter() - started
            self._active.add(-1, labels)
            self._duration.record(took_s, labels | {names.ATTR_HTTP_STATUS: seen.status})
            seen.close()
            log.info("%s %s %d %s %.0f ms %s", method, route, seen.status, seen.reason, took_s * 1e3, seen.request_id)
