"""Real exporters into the sink, and back out of its files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from meshfire.telemetry import names
from meshfire.telemetry.setup import configure
from meshfire.telemetry.sink import TraceSink
from meshfire.telemetry.spans import span, trace_id_of, traceparent_of
from meshfire.telemetry.store import find_trace, newest_first


def _a_request(endpoint: str) -> str:
    """A trace over three services, each with an exporter of its own; its id."""
    services = {name: configure(name, f"{name}-0", otlp_endpoint=endpoint) for name in ("gateway", "router", "decode")}
    with span(services["gateway"].tracer, names.SPAN_GATEWAY_REQUEST) as top:
        attributes = {names.ATTR_TOKENS_PROMPT: 7, names.ATTR_MODEL: "m", names.ATTR_STREAM: True}
        with span(
            services["router"].tracer, names.SPAN_ROUTER_GENERATE, parent=traceparent_of(top), attributes=attributes
        ) as middle:
            middle.add_event(names.EVENT_FAILOVER, {names.ATTR_EPOCH: 2})
            for _ in range(4):
                with span(services["decode"].tracer, names.SPAN_DECODE_LEASE, parent=traceparent_of(middle)):
                    pass
    for telemetry in services.values():
        telemetry.shutdown()
    return trace_id_of(top)


async def test_every_span_of_every_service_arrives_in_one_file(tmp_path: Path) -> None:
    async with TraceSink(tmp_path) as sink:
        trace_id = await asyncio.to_thread(_a_request, sink.endpoint)
        spans = find_trace(tmp_path, trace_id)  # readable while the sink runs
    assert sorted(one.name for one in spans) == sorted(
        [names.SPAN_GATEWAY_REQUEST, names.SPAN_ROUTER_GENERATE, *[names.SPAN_DECODE_LEASE] * 4]
    )
    middle = next(one for one in spans if one.name == names.SPAN_ROUTER_GENERATE)
    assert middle.attributes == {names.ATTR_TOKENS_PROMPT: 7, names.ATTR_MODEL: "m", names.ATTR_STREAM: True}
    assert [(event.name, event.attributes) for event in middle.events] == [
        (names.EVENT_FAILOVER, {names.ATTR_EPOCH: 2})
    ]
    assert (middle.service, middle.instance) == ("router", "router-0")
    assert {one.parent_id for one in spans if one.name == names.SPAN_DECODE_LEASE} == {middle.span_id}
    assert all(one.start_ns <= one.end_ns for one in spans)


async def test_a_span_without_proper_ids_is_skipped_and_the_rest_of_its_batch_kept(tmp_path: Path) -> None:
    good = trace_pb2.Span(trace_id=bytes(15) + b"\1", span_id=bytes(7) + b"\1", name="decode.lease")
    bad = trace_pb2.Span(trace_id=b"../../../etc", span_id=b"x")
    scope = trace_pb2.ScopeSpans(spans=[bad, good])
    request = trace_service_pb2.ExportTraceServiceRequest(resource_spans=[trace_pb2.ResourceSpans(scope_spans=[scope])])
    async with (
        TraceSink(tmp_path) as sink,
        grpc.aio.insecure_channel(sink.endpoint.removeprefix("http://")) as channel,
    ):
        await trace_service_pb2_grpc.TraceServiceStub(channel).Export(request)
    assert [path.stem for path in newest_first(tmp_path)] == [f"{1:032x}"]
