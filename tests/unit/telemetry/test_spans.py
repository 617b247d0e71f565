"""Traceparent strings and spans, against the SDK's own in-memory exporter and W3C propagator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import INVALID_SPAN, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from meshfire.errors import QueueFull
from meshfire.telemetry import names
from meshfire.telemetry.setup import Telemetry, configure
from meshfire.telemetry.spans import parse_traceparent, span, start_span, trace_id_of, traceparent_of

EXAMPLE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"  # the specification's


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> Telemetry:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    return configure("router", "router-1", exporter=exporter)


def test_a_child_in_another_process_has_its_parents_trace_and_span_id(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    other = configure("prefill", "prefill-1", exporter=exporter)
    with span(telemetry.tracer, names.SPAN_ROUTER_GENERATE) as parent:
        start_span(other.tracer, names.SPAN_PREFILL_LEASE, parent=traceparent_of(parent)).end()
    telemetry.flush()
    other.flush()
    by_name = {one.name: one for one in exporter.get_finished_spans()}
    child, root = by_name[names.SPAN_PREFILL_LEASE], by_name[names.SPAN_ROUTER_GENERATE]
    assert child.context.trace_id == root.context.trace_id
    assert child.parent is not None
    assert child.parent.span_id == root.context.span_id
    assert root.parent is None
    assert child.resource.attributes["service.name"] == "prefill"
    assert child.resource.attributes["service.instance.id"] == "prefill-1"


def test_a_span_without_parent_is_a_root_even_inside_another_span(telemetry: Telemetry) -> None:
    with telemetry.tracer.start_as_current_span(names.SPAN_DECODE_STEPS) as ambient:
        inner = start_span(telemetry.tracer, names.SPAN_DECODE_LEASE, parent=None)
        assert trace_id_of(inner) != trace_id_of(ambient)


def test_a_failed_block_marks_its_span_with_the_errors_reason(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    with pytest.raises(QueueFull), span(telemetry.tracer, names.SPAN_ROUTER_GENERATE):
        raise QueueFull("no room")
    telemetry.flush()
    (failed,) = exporter.get_finished_spans()
    assert not failed.status.is_ok
    assert failed.attributes is not None
    assert failed.attributes[names.ATTR_ERROR_REASON] == "QUEUE_FULL"


def test_the_specifications_example_is_read_and_written_back() -> None:
    context = parse_traceparent(EXAMPLE)
    assert context is not None
    assert f"{context.trace_id:032x}" == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert context.trace_flags.sampled


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "nonsense",
        EXAMPLE.upper(),
        EXAMPLE + "-extra",
        "ff" + EXAMPLE[2:],
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
        EXAMPLE + "\n",
    ],
)
def test_a_broken_parent_starts_a_new_trace_instead_of_failing(telemetry: Telemetry, text: str | None) -> None:
    assert parse_traceparent(text) is None
    assert trace_id_of(start_span(telemetry.tracer, names.SPAN_GATEWAY_REQUEST, parent=text)) != ""


def test_a_trace_that_its_caller_does_not_sample_has_no_id_to_show(telemetry: Telemetry) -> None:
    unsampled = start_span(telemetry.tracer, names.SPAN_GATEWAY_REQUEST, parent=EXAMPLE[:-2] + "00")
    assert trace_id_of(unsampled) == ""
    assert traceparent_of(unsampled).endswith("-00")
    assert (trace_id_of(INVALID_SPAN), traceparent_of(INVALID_SPAN)) == ("", "")


def _field(num_digits: int) -> st.SearchStrategy[str]:
    return st.integers(0, 16**num_digits - 1).map(lambda number: f"{number:0{num_digits}x}")


@given(
    st.tuples(_field(2), _field(32), _field(16), _field(2)).map("-".join) | st.text("0123456789abcdef-", max_size=60)
)
def test_parsing_agrees_with_the_sdks_propagator(text: str) -> None:
    theirs = get_current_span(
        TraceContextTextMapPropagator().extract({"traceparent": text}, Context())
    ).get_span_context()
    ours = parse_traceparent(text)
    if ours is None:
        assert not theirs.is_valid or text != text.strip()
    else:
        assert (ours.trace_id, ours.span_id, ours.trace_flags) == (theirs.trace_id, theirs.span_id, theirs.trace_flags)
