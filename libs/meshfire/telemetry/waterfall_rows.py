"""A trace as rows: who waited for whom, when, and with what. Pure; knows neither terminal nor store.

Repeated sibling spans of one kind (same service, instance and name) become one row with a count, and their children are
pooled below it: a prompt of eighty chunks, each with a hop to every shard, is a handful of rows. So do events of one
name whose words agree (those of one shard, say).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from meshfire.telemetry import names
from meshfire.telemetry.record import EventRecord, SpanRecord, Value


class Unit(Enum):
    """How an attribute reads, and whether those of a repeated span add up."""

    COUNT = "count"
    BYTES = "bytes"
    MS = "ms"
    WORD = "word"


#: what a row shows, in this order: attribute → (label, unit)
SHOWN: Final[Mapping[str, tuple[str, Unit]]] = {
    names.ATTR_MODEL: ("model", Unit.WORD),
    names.ATTR_SHARD_ID: ("shard", Unit.WORD),
    names.ATTR_WORKER_ID: ("worker", Unit.WORD),
    names.ATTR_EPOCH: ("epoch", Unit.WORD),
    names.ATTR_HTTP_STATUS: ("status", Unit.WORD),
    names.ATTR_TOKENS_PROMPT: ("prompt", Unit.COUNT),
    names.ATTR_TOKENS_CACHED: ("cached", Unit.COUNT),
    names.ATTR_TOKENS_OUTPUT: ("output", Unit.COUNT),
    names.ATTR_CHUNK_TOKENS: ("tokens", Unit.COUNT),
    names.ATTR_STEPS: ("steps", Unit.COUNT),
    names.ATTR_QUEUE_WAIT_MS: ("queued", Unit.MS),
    names.ATTR_KV_BLOCKS: ("blocks", Unit.COUNT),
    names.ATTR_KV_BYTES: ("kv", Unit.BYTES),
    names.ATTR_EXPERT_HOPS: ("hops", Unit.COUNT),
    names.ATTR_EXPERT_TOKENS: ("tokens", Unit.COUNT),
    names.ATTR_EXPERT_BYTES_OUT: ("out", Unit.BYTES),
    names.ATTR_EXPERT_BYTES_IN: ("in", Unit.BYTES),
    names.ATTR_EXPERT_WAIT_MS: ("wait", Unit.MS),
    names.ATTR_EXPERT_QUEUE_MS: ("queue", Unit.MS),
    names.ATTR_EXPERT_COMPUTE_MS: ("compute", Unit.MS),
    names.ATTR_COMPUTE_MS: ("compute", Unit.MS),
    names.ATTR_FINISH_REASON: ("finish", Unit.WORD),
    names.ATTR_ERROR_REASON: ("reason", Unit.WORD),
}


@dataclass(frozen=True)
class Note:
    """One shown attribute; words of a repeated span are shown only if all agree, numbers are their sum."""

    label: str
    value: Value
    unit: Unit


@dataclass(frozen=True)
class Row:
    """One line. Times in milliseconds; `offset_ms` counts from the trace's first start; `duration_ms` reaches from the
    first start to the last end, `busy_ms` adds the spans' own durations (they may overlap)."""

    depth: int
    service: str
    instance: str
    name: str
    count: int
    offset_ms: float
    duration_ms: float
    busy_ms: float
    num_failed: int
    error: str
    notes: tuple[Note, ...]
    is_event: bool = False


def rows_of(spans: Iterable[SpanRecord]) -> list[Row]:
    """Every span in exactly one row, parents before children, siblings by start. A span whose parent is not there (not
    yet exported, or lost) starts a tree of its own; a span that arrived twice counts once."""
    by_id = {span.span_id: span for span in spans}
    if not by_id:
        return []
    origin_ns = min(span.start_ns for span in by_id.values())
    waiting = [(0, group) for group in reversed(_groups(_roots(by_id)))]
    children = _children(by_id)
    unseen = dict(by_id)
    rows: list[Row] = []
    while unseen:
        # Broken data may hold a ring of parents, which no root reaches: cut it at its earliest span.
        depth, group = waiting.pop() if waiting else (0, [min(unseen.values(), key=_order)])
        group = [span for span in group if unseen.pop(span.span_id, None)]
        if group:
            rows.append(_row(depth, group, origin_ns))
            rows += _event_rows(depth + 1, group, origin_ns)
            below = [child for span in group for child in children.get(span.span_id, ())]
            waiting += [(depth + 1, one) for one in reversed(_groups(below))]
    return rows


def _order(span: SpanRecord) -> tuple[int, int, str]:
    return span.start_ns, -span.end_ns, span.span_id


def _roots(by_id: Mapping[str, SpanRecord]) -> list[SpanRecord]:
    return [span for span in by_id.values() if span.parent_id not in by_id]


def _children(by_id: Mapping[str, SpanRecord]) -> dict[str, list[SpanRecord]]:
    found: dict[str, list[SpanRecord]] = {}
    for span in by_id.values():
        found.setdefault(span.parent_id, []).append(span)
    return found


def _groups(siblings: Iterable[SpanRecord]) -> list[list[SpanRecord]]:
    """By kind, ordered by their first start."""
    found: dict[tuple[str, str, str], list[SpanRecord]] = {}
    for span in sorted(siblings, key=_order):
        found.setdefault((span.service, span.instance, span.name), []).append(span)
    return list(found.values())


def _row(depth: int, group: Sequence[SpanRecord], origin_ns: int) -> Row:
    first = group[0]
    start_ns = min(span.start_ns for span in group)
    errors = [span.error for span in group if span.error]
    return Row(
        depth=depth,
        service=first.service,
        instance=first.instance,
        name=first.name,
        count=len(group),
        offset_ms=(start_ns - origin_ns) / 1e6,
        duration_ms=(max(span.end_ns for span in group) - start_ns) / 1e6,
        busy_ms=sum(span.end_ns - span.start_ns for span in group) / 1e6,
        num_failed=len(errors),
        error=errors[0] if errors else "",
        notes=tuple(_notes([span.attributes for span in group])),
    )


def _event_rows(depth: int, group: Sequence[SpanRecord], origin_ns: int) -> Iterable[Row]:
    kinds: dict[tuple[object, ...], list[EventRecord]] = {}
    for event in sorted((event for span in group for event in span.events), key=lambda event: event.at_ns):
        words = tuple(event.attributes.get(key) for key, (_, unit) in SHOWN.items() if unit is Unit.WORD)
        kinds.setdefault((event.name, *words), []).append(event)
    for events in kinds.values():
        yield Row(
            depth=depth,
            service=group[0].service,
            instance=group[0].instance,
            name=events[0].name,
            count=len(events),
            offset_ms=max(0.0, (events[0].at_ns - origin_ns) / 1e6),
            duration_ms=max(0, events[-1].at_ns - events[0].at_ns) / 1e6,
            busy_ms=0.0,
            num_failed=0,
            error="",
            notes=tuple(_notes([event.attributes for event in events])),
            is_event=True,
        )


def _notes(group: Sequence[Mapping[str, Value]]) -> Iterable[Note]:
    for key, (label, unit) in SHOWN.items():
        values = [attributes[key] for attributes in group if key in attributes]
        if unit is Unit.WORD:
            if len(set(values)) == 1 and values[0] != "":
                yield Note(label, values[0], unit)
        elif values:
            yield Note(label, sum(value for value in values if isinstance(value, int | float)), unit)
