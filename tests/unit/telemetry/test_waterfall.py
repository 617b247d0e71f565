"""From spans to rows to terminal lines."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from meshfire.telemetry import names
from meshfire.telemetry.record import EventRecord, SpanRecord
from meshfire.telemetry.waterfall import bar_of, render
from meshfire.telemetry.waterfall_rows import Row, rows_of

MS = 1_000_000


def a_span(span_id: str, parent_id: str, name: str, start_ms: float, end_ms: float, **changes: object) -> SpanRecord:
    record = SpanRecord("ab" * 16, span_id, parent_id, "router", "router-0", name, int(start_ms * MS), int(end_ms * MS))
    return replace(record, **changes)  # type: ignore[arg-type]


def shape(rows: list[Row]) -> list[tuple[int, str, int]]:
    return [(row.depth, row.name, row.count) for row in rows]


def test_children_follow_their_parents_and_siblings_their_start() -> None:
    spans = [
        a_span("3", "1", "late", 30, 40),
        a_span("2", "1", "early", 10, 20),
        a_span("4", "2", "inner", 12, 15),
        a_span("1", "", "root", 0, 50),
    ]
    rows = rows_of(spans)
    assert shape(rows) == [(0, "root", 1), (1, "early", 1), (2, "inner", 1), (1, "late", 1)]
    assert [(row.offset_ms, row.duration_ms) for row in rows] == [(0, 50), (10, 10), (12, 3), (30, 10)]


def test_repeated_siblings_are_one_row_whose_numbers_add_up_and_whose_children_are_pooled() -> None:
    tokens, model, epoch = names.ATTR_CHUNK_TOKENS, names.ATTR_MODEL, names.ATTR_EPOCH
    spans = [
        a_span("1", "", "root", 0, 100),
        a_span("2", "1", "chunk", 0, 10, attributes={tokens: 512, model: "m", epoch: 1}),
        a_span("3", "1", "chunk", 20, 35, attributes={tokens: 88, model: "m", epoch: 2}, error="lost"),
        a_span("4", "2", "hop", 1, 2, instance="shard-0"),
        a_span("5", "3", "hop", 21, 22, instance="shard-0"),
        a_span("6", "3", "hop", 21, 23, instance="shard-1"),
    ]
    rows = rows_of(spans)
    assert shape(rows) == [(0, "root", 1), (1, "chunk", 2), (2, "hop", 2), (2, "hop", 1)]
    chunk = rows[1]
    assert (chunk.offset_ms, chunk.duration_ms, chunk.busy_ms) == (0, 35, 25)
    assert [(note.label, note.value) for note in chunk.notes] == [("model", "m"), ("tokens", 600)]
    assert (chunk.num_failed, chunk.error) == (1, "lost")


def test_events_of_repeated_spans_are_summed_shard_by_shard_below_their_spans() -> None:
    def hop(shard: str, num_bytes: int, at_ms: int) -> EventRecord:
        attributes = {names.ATTR_SHARD_ID: shard, names.ATTR_EXPERT_BYTES_OUT: num_bytes}
        return EventRecord(names.EVENT_EXPERT_SHARD, at_ms * MS, attributes)

    spans = [
        a_span("1", "", "root", 0, 100),
        a_span("2", "1", "chunk", 0, 10, events=(hop("a", 1, 9), hop("b", 10, 9))),
        a_span("3", "1", "chunk", 20, 35, events=(hop("b", 20, 34), hop("a", 2, 34))),
    ]
    events = [row for row in rows_of(spans) if row.is_event]
    assert [(row.depth, row.count, row.offset_ms) for row in events] == [(2, 2, 9), (2, 2, 9)]
    assert [[note.value for note in row.notes] for row in events] == [["a", 3], ["b", 30]]


def test_a_span_whose_parent_never_arrived_is_still_shown() -> None:
    assert shape(rows_of([a_span("2", "missing", "orphan", 5, 6), a_span("1", "", "root", 0, 9)])) == [
        (0, "root", 1),
        (0, "orphan", 1),
    ]


def test_no_spans_make_no_rows() -> None:
    assert rows_of([]) == []
    assert "empty" in _printed([])


IDS = st.sampled_from(["", "1", "2", "3", "4", "5", "6"])
SPANS = st.lists(
    st.builds(a_span, IDS.filter(bool), IDS, st.sampled_from("ab"), st.integers(0, 50), st.integers(50, 99)),
    max_size=12,
)


@given(SPANS)
def test_every_span_is_in_exactly_one_row_whatever_the_parents(spans: list[SpanRecord]) -> None:
    rows = rows_of(spans)
    assert sum(row.count for row in rows) == len({span.span_id for span in spans})
    assert all(row.offset_ms >= 0 and row.duration_ms >= 0 for row in rows)
    assert all(after.depth <= before.depth + 1 for before, after in pairwise(rows))


@given(st.floats(0, 100), st.floats(0, 100), st.integers(1, 40))
def test_a_bar_is_as_wide_as_asked_and_never_empty(offset_ms: float, duration_ms: float, cells: int) -> None:
    row = replace(rows_of([a_span("1", "", "a", 0, 1)])[0], offset_ms=offset_ms, duration_ms=duration_ms)
    bar = bar_of(row, offset_ms + duration_ms, cells)
    assert len(bar) == cells
    assert bar.strip()


def test_the_waterfall_names_services_durations_and_counts_and_lets_no_attribute_steer_the_terminal() -> None:
    spans = [
        a_span("1", "", names.SPAN_ROUTER_GENERATE, 0, 1500, attributes={names.ATTR_MODEL: "[red]\x1b[2J"}),
        a_span("2", "1", names.SPAN_DECODE_READ_KV, 10, 20, service="decode", instance="decode-7"),
        a_span("3", "1", names.SPAN_DECODE_READ_KV, 30, 40, service="decode", instance="decode-7"),
    ]
    printed = _printed(spans)
    assert "1.50 s, 3 spans, 2 services" in printed
    assert "decode.read_kv ×2" in printed
    assert "decode-7" in printed
    assert "model [red]?[2J" in printed
    assert "\x1b" not in printed


def _printed(spans: list[SpanRecord]) -> str:
    output = io.StringIO()
    Console(file=output, width=160).print(render(spans))
    return output.getvalue()
