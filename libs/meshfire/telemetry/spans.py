"""Spans across processes that talk by messages: a parent is a W3C `traceparent` string, a span is ended by its maker.

Owns the string form and the rule that a broken or absent parent starts a new trace instead of failing a request. Knows
nothing of gRPC metadata or of any service; context variables are not used, because one engine step serves many traces.
Source of the format: W3C Trace Context, level 1, section 3.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

from meshfire.errors import MeshfireError
from meshfire.telemetry import names

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)


def start_span(
    tracer: Tracer,
    name: str,
    *,
    parent: str | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    start_time_ns: int | None = None,
) -> Span:
    """A started span below `parent` (a traceparent; None, "" or a malformed one starts a new trace). Call `.end()`.

    `name` is a `names.SPAN_…` constant. `start_time_ns` is Unix time, for a span made after its work began.
    """
    return tracer.start_span(name, context_of(parent), kind, attributes=attributes, start_time=start_time_ns)


@contextmanager
def span(
    tracer: Tracer,
    name: str,
    *,
    parent: str | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Iterator[Span]:
    """`start_span` for a block of code: ended at its end, marked failed (with the error's reason) if it raises."""
    started = start_span(tracer, name, parent=parent, attributes=attributes, kind=kind)
    try:
        yield started
    except BaseException as error:
        mark_failed(started, error)
        raise
    finally:
        started.end()


def mark_failed(span: Span, error: BaseException) -> None:
    """Error status and `meshfire.error.reason`: the tree's reason for our errors, the class name for any other."""
    reason = error.reason if isinstance(error, MeshfireError) else type(error).__name__
    span.set_attribute(names.ATTR_ERROR_REASON, reason)
    span.set_status(Status(StatusCode.ERROR, str(error)))


def traceparent_of(span: Span) -> str:
    """The string that a message carries so that the receiver's spans hang below this one; "" for an invalid span."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags) & 0xFF:02x}"


def trace_id_of(span: Span) -> str:
    """32 hexadecimal digits, or "" if nobody records this trace."""
    context = span.get_span_context()
    if not context.is_valid or not context.trace_flags.sampled:
        return ""
    return f"{context.trace_id:032x}"


def context_of(traceparent: str | None) -> Context:
    """An explicit context, never the ambient one, so that a span cannot end up in whatever trace runs on this task."""
    remote = parse_traceparent(traceparent)
    if remote is None:
        return Context()
    return set_span_in_context(NonRecordingSpan(remote), Context())


def parse_traceparent(text: str | None) -> SpanContext | None:
    """None for absent, malformed, all-zero, or version ff; later versions are read by the fields of version 00."""
    found = _TRACEPARENT.fullmatch(text or "")
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["rest"]):
        return None
    context = SpanContext(
        trace_id=int(found["trace"], 16),
        span_id=int(found["span"], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(found["flags"], 16)),
    )
    return context if context.is_valid else None
