"""A finished span as Meshfire keeps it: one line of JSON, made from OTLP. Owns the two conversions and nothing else.

Links and nested attribute values are left out on purpose: the local store answers "where did the time go"; a collector
gets everything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from meshfire.errors import BadInput
from meshfire.telemetry import names

Value = str | bool | int | float


@dataclass(frozen=True)
class EventRecord:
    """Something that happened within a span, at Unix nanoseconds."""

    name: str
    at_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class SpanRecord:
    """Times are Unix nanoseconds; ids lower-case hexadecimal; `parent_id` is "" for a root; `error` is "" for a span
    that did not fail, else what it says about its failure."""

    trace_id: str
    span_id: str
    parent_id: str
    service: str
    instance: str
    name: str
    start_ns: int
    end_ns: int
    error: str = ""
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: tuple[EventRecord, ...] = ()

    def to_line(self) -> bytes:
        """With its newline; no other newline inside."""
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> SpanRecord:
        """Raises BadInput for anything that `to_line` did not write."""
        try:
            fields = json.loads(line)
            fields["events"] = tuple(EventRecord(**event) for event in fields["events"])
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"not a stored span: {line[:80]!r}", field="trace") from error


def records_of(batches: Iterable[trace_pb2.ResourceSpans]) -> Iterator[SpanRecord]:
    """Every well-formed span; one without proper ids is skipped, as the OTLP specification wants of receivers."""
    for batch in batches:
        resource = _attributes(batch.resource.attributes)
        service = str(resource.get(names.ATTR_SERVICE_NAME, "unknown"))
        instance = str(resource.get(names.ATTR_SERVICE_INSTANCE_ID, ""))
        for scope in batch.scope_spans:
            for span in scope.spans:
                if len(span.trace_id) == 16 and len(span.span_id) == 8:
                    yield _record(span, service, instance)


def _record(span: trace_pb2.Span, service: str, instance: str) -> SpanRecord:
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return SpanRecord(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        service=service,
        instance=instance,
        name=span.name,
        start_ns=span.start_time_unix_nano,
        end_ns=max(span.start_time_unix_nano, span.end_time_unix_nano),
        error=(span.status.message or "error") if failed else "",
        attributes=_attributes(span.attributes),
        events=tuple(EventRecord(one.name, one.time_unix_nano, _attributes(one.attributes)) for one in span.events),
    )


def _attributes(pairs: Iterable[common_pb2.KeyValue]) -> dict[str, Value]:
    found = {pair.key: _value(pair.value) for pair in pairs}
    return {key: value for key, value in found.items() if value is not None}


def _value(value: common_pb2.AnyValue) -> Value | None:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case _:
            return None
