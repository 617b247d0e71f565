"""The local trace store: bounds, prefixes, reading while it is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshfire.errors import BadInput, NotFound
from meshfire.telemetry.record import EventRecord, SpanRecord
from meshfire.telemetry.store import Bounds, TraceWriter, find_trace, newest_first, read_trace


def trace_id(number: int) -> str:
    return f"{number:032x}"


def one_span(number: int, name: str = "decode.lease", **changes: object) -> SpanRecord:
    fields: dict[str, object] = {
        "trace_id": trace_id(number),
        "span_id": "00f067aa0ba902b7",
        "parent_id": "",
        "service": "decode",
        "instance": "decode-0",
        "name": name,
        "start_ns": 1,
        "end_ns": 2,
        "attributes": {"meshfire.model": "line\nbreak é", "meshfire.steps": 3, "meshfire.stream": True},
        "events": (EventRecord("meshfire.failover", 2, {"meshfire.epoch": 2}),),
    }
    return SpanRecord(**{**fields, **changes})  # type: ignore[arg-type]


def test_spans_come_back_as_they_were_in_the_order_they_arrived(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    spans = [one_span(1, span_id=f"{at:016x}") for at in range(3)]
    writer.add(spans[:2])
    writer.add([one_span(2), spans[2]])
    assert find_trace(tmp_path, trace_id(1)) == spans


def test_the_least_recently_written_traces_make_room_for_new_ones(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, Bounds(max_traces=2))
    for number in (1, 2, 1, 3):
        writer.add([one_span(number)])
    assert {path.stem for path in newest_first(tmp_path)} == {trace_id(1), trace_id(3)}


def test_the_bytes_of_all_traces_are_bounded(tmp_path: Path) -> None:
    size = len(one_span(1).to_line())
    writer = TraceWriter(tmp_path, Bounds(max_bytes=3 * size))
    for number in range(10):
        writer.add([one_span(number)])
    assert sorted(path.stem for path in newest_first(tmp_path)) == [trace_id(7), trace_id(8), trace_id(9)]


def test_a_trace_that_grows_beyond_its_bound_keeps_what_it_has(tmp_path: Path) -> None:
    size = len(one_span(1).to_line())
    writer = TraceWriter(tmp_path, Bounds(max_trace_bytes=2 * size))
    for _ in range(5):
        writer.add([one_span(1)])
    assert len(find_trace(tmp_path, trace_id(1))) == 2


def test_a_new_writer_counts_what_an_earlier_run_left(tmp_path: Path) -> None:
    for number in (1, 2):
        TraceWriter(tmp_path).add([one_span(number)])
        os.utime(tmp_path / f"{trace_id(number)}.jsonl", ns=(number, number))
    TraceWriter(tmp_path, Bounds(max_traces=2)).add([one_span(3)])
    assert {path.stem for path in newest_first(tmp_path)} == {trace_id(2), trace_id(3)}


def test_a_reader_skips_a_line_that_is_still_being_written(tmp_path: Path) -> None:
    TraceWriter(tmp_path).add([one_span(1)])
    path = tmp_path / f"{trace_id(1)}.jsonl"
    with path.open("ab") as file:
        file.write(one_span(1).to_line()[:40])
    assert read_trace(path) == [one_span(1)]


def test_a_prefix_finds_its_trace_and_last_finds_the_newest(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path)
    writer.add([one_span(0xAB << 120), one_span(0xAC << 120)])
    os.utime(tmp_path / f"{trace_id(0xAB << 120)}.jsonl", ns=(10, 10))
    assert find_trace(tmp_path, "AB ")[0].trace_id == trace_id(0xAB << 120)
    assert find_trace(tmp_path, "last")[0].trace_id == trace_id(0xAC << 120)
    with pytest.raises(BadInput, match="2 traces"):
        find_trace(tmp_path, "a")
    with pytest.raises(NotFound):
        find_trace(tmp_path, "ff")
    with pytest.raises(NotFound):
        find_trace(tmp_path / "nowhere", "last")


def test_files_that_are_no_traces_are_never_read_nor_removed(tmp_path: Path) -> None:
    stranger = tmp_path / "notes.jsonl"
    stranger.write_text("mine")
    writer = TraceWriter(tmp_path, Bounds(max_traces=1))
    writer.add([one_span(1), one_span(2)])
    assert stranger.read_text() == "mine"
    assert len(newest_first(tmp_path)) == 1
