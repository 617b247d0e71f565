"""One process's telemetry, as an object: tracer, meter and the registry that `/metrics` renders.

Owns the wiring of the OpenTelemetry SDK. Sets no global provider, so that several services can live in one process
(tests, `meshfire.testing`) without sharing spans. Knows no span or instrument of any service.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import Meter
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    OTEL_SDK_DISABLED,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry, generate_latest

from meshfire.telemetry import names

SCHEDULE_DELAY_MS = 250
"""A span leaves the process within this time: `meshfire trace` right after an answer must find all of it."""
EXPORT_TIMEOUT_MS = 3_000
MAX_QUEUED_SPANS = 8_192
MAX_BATCH_SPANS = 512
SHUTDOWN_TIMEOUT_MS = 3_000


@dataclass(frozen=True)
class Telemetry:
    """What a service gets. `tracer` and `meter` are the OpenTelemetry API's."""

    tracer: Tracer
    meter: Meter
    registry: CollectorRegistry
    _tracers: TracerProvider = field(repr=False)
    _meters: MeterProvider = field(repr=False)

    def prometheus_text(self) -> bytes:
        """The body of a `/metrics` answer, Prometheus text format."""
        return generate_latest(self.registry)

    def flush(self) -> None:
        """Hand every ended span to the exporter; blocks up to the shutdown timeout."""
        self._tracers.force_flush(SHUTDOWN_TIMEOUT_MS)

    def shutdown(self) -> None:
        """Flush and stop. Blocking (an exporter may wait for its collector): call it off the event loop."""
        self._tracers.shutdown()
        self._meters.shutdown()


def configure(
    service: str,
    instance_id: str,
    *,
    otlp_endpoint: str | None = None,
    exporter: SpanExporter | None = None,
) -> Telemetry:
    """Telemetry of one service instance.

    Spans go to `exporter` if given, else over OTLP/gRPC to `otlp_endpoint` (or to what the `OTEL_EXPORTER_OTLP_…`
    variables name), else they are made and dropped, so that trace ids exist either way. `OTEL_RESOURCE_ATTRIBUTES`,
    `OTEL_TRACES_SAMPLER` and `OTEL_SDK_DISABLED` keep their meaning.
    """
    resource = Resource.create({names.ATTR_SERVICE_NAME: service, names.ATTR_SERVICE_INSTANCE_ID: instance_id})
    tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = exporter or _otlp_exporter(otlp_endpoint)
    if exporter is not None:
        tracers.add_span_processor(_batching(exporter))
    registry = CollectorRegistry()
    reader = PrometheusMetricReader(registry=registry, scope_info_enabled=False)
    meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    return Telemetry(tracers.get_tracer(names.SCOPE), meters.get_meter(names.SCOPE), registry, tracers, meters)


def _otlp_exporter(endpoint: str | None) -> SpanExporter | None:
    named = (
        endpoint or os.environ.get(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) or os.environ.get(OTEL_EXPORTER_OTLP_ENDPOINT)
    )
    if not named or os.environ.get(OTEL_SDK_DISABLED, "").lower() == "true":
        return None
    # TLS only if the address asks for it; a bare host:port is a collector on the same machine or pod.
    secure = named.startswith("https://")
    return OTLPSpanExporter(endpoint=named, insecure=not secure, timeout=EXPORT_TIMEOUT_MS / 1_000)


def _batching(exporter: SpanExporter) -> BatchSpanProcessor:
    return BatchSpanProcessor(
        exporter,
        max_queue_size=MAX_QUEUED_SPANS,
        schedule_delay_millis=SCHEDULE_DELAY_MS,
        max_export_batch_size=MAX_BATCH_SPANS,
        export_timeout_millis=EXPORT_TIMEOUT_MS,
    )
