"""Telemetry objects: no global state, metrics by Prometheus' names, spans dropped where nobody listens."""

from __future__ import annotations

import pytest
from opentelemetry import metrics, trace
from prometheus_client.parser import text_string_to_metric_families

from meshfire.telemetry import names
from meshfire.telemetry.instruments import TTFT_BOUNDS_S
from meshfire.telemetry.setup import configure
from meshfire.telemetry.spans import start_span, trace_id_of


@pytest.fixture(autouse=True)
def no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


def test_two_services_in_one_process_share_no_metric_and_set_no_global_provider() -> None:
    before = (trace.get_tracer_provider(), metrics.get_meter_provider())
    first, second = configure("a", "a-1"), configure("b", "b-1")
    first.meter.create_counter(names.METRIC_DECODE_TOKENS).add(3)
    assert b"meshfire_decode_tokens_total" in first.prometheus_text()
    assert b"meshfire_decode_tokens_total" not in second.prometheus_text()
    assert (trace.get_tracer_provider(), metrics.get_meter_provider()) == before
    first.shutdown()
    second.shutdown()


def test_spans_have_trace_ids_where_nothing_is_exported() -> None:
    telemetry = configure("a", "a-1")
    assert len(trace_id_of(start_span(telemetry.tracer, names.SPAN_ROUTER_GENERATE))) == 32
    telemetry.shutdown()


def test_a_histogram_has_the_conventions_name_unit_and_bounds_in_prometheus_text() -> None:
    telemetry = configure("router", "router-1")
    histogram = telemetry.meter.create_histogram(
        names.METRIC_TTFT, "s", "Time to first token", explicit_bucket_boundaries_advisory=TTFT_BOUNDS_S
    )
    histogram.record(0.3, {names.ATTR_MODEL: "m"})
    families = {one.name: one for one in text_string_to_metric_families(telemetry.prometheus_text().decode())}
    family = families["gen_ai_server_time_to_first_token_seconds"]
    bounds = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]
    assert [float(bound) for bound in bounds[:-1]] == list(TTFT_BOUNDS_S)
    assert {sample.labels["meshfire_model"] for sample in family.samples} == {"m"}
    telemetry.shutdown()


def test_a_disabled_sdk_exports_nothing_even_with_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    telemetry = configure("a", "a-1", otlp_endpoint="http://127.0.0.1:9")
    span = start_span(telemetry.tracer, names.SPAN_ROUTER_GENERATE)
    assert trace_id_of(span) == ""
    telemetry.shutdown()
