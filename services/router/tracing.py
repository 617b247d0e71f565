"""What one request's spans and metrics record while its leases wait, go out and fail."""

from __future__ import annotations

from opentelemetry.trace import Span, Tracer
from opentelemetry.util.types import AttributeValue

from meshfire.telemetry import names
from meshfire.telemetry.spans import start_span, traceparent_of
from services.router.instruments import Instruments
from services.router.lifecycle import Life
from services.router.lifecycle_events import Stage
from services.router.outlook import Outlook

_QUEUE_SPANS = {Stage.PREFILL: names.SPAN_ROUTER_QUEUE_PREFILL, Stage.DECODE: names.SPAN_ROUTER_QUEUE_DECODE}


class RequestTrace:
    """A `services.router.active.Watcher`: one span per wait in a queue, below the request's own."""

    def __init__(self, tracer: Tracer, span: Span, instruments: Instruments, model: str, outlook: Outlook) -> None:
        self._tracer = tracer
        self._span = span
        self._instruments = instruments
        self._model = model
        #: None once it was held against what came
        self._outlook: Outlook | None = outlook
        self._waiting: Span | None = None
        span.set_attribute(names.ATTR_QUEUE_POSITION, outlook.position)
        span.set_attribute(names.ATTR_QUEUE_PREDICTED_MS, outlook.wait_s * 1000)

    def queued(self, stage: Stage, epoch: int) -> None:
        self._waiting = start_span(
            self._tracer,
            _QUEUE_SPANS[stage],
            parent=traceparent_of(self._span),
            attributes={names.ATTR_MODEL: self._model, names.ATTR_EPOCH: epoch},
        )

    def placed(self, stage: Stage, worker_id: str, wait_s: float) -> None:
        if self._waiting is not None:
            self._waiting.set_attribute(names.ATTR_WORKER_ID, worker_id)
            self._waiting.set_attribute(names.ATTR_QUEUE_WAIT_MS, wait_s * 1000)
        labels = {names.ATTR_MODEL: self._model, names.ATTR_WORKER_ROLE: stage.value}
        self._instruments.queue_wait.record(wait_s, labels)
        if self._outlook is not None:
            self._instruments.wait_predicted(self._outlook.wait_s, wait_s, {names.ATTR_MODEL: self._model})
            self._outlook = None
        self.withdrawn()

    def withdrawn(self) -> None:
        if self._waiting is not None:
            self._waiting.end()
            self._waiting = None

    def failed_over(self, life: Life) -> None:
        reason = life.last_error.reason if life.last_error is not None else ""
        attributes: dict[str, AttributeValue] = {
            names.ATTR_EPOCH: life.epoch,
            names.ATTR_WORKER_ID: life.avoid or "",
            names.ATTR_ERROR_REASON: reason,
        }
        self._span.add_event(names.EVENT_FAILOVER, attributes)
        self._instruments.failovers.add(1, {names.ATTR_MODEL: self._model, names.ATTR_ERROR_REASON: reason})
