"""A trace in the terminal: one line a row, a bar for when, the numbers that explain it. Owns looks, no decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshfire.telemetry.record import SpanRecord
from meshfire.telemetry.waterfall_rows import Note, Row, Unit, rows_of

BAR_CELLS = 24
MAX_INDENT = 12
_COLOURS: Final = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")


def render(spans: Sequence[SpanRecord], *, bar_cells: int = BAR_CELLS) -> RenderableType:
    """Something for `rich.console.Console.print`: a headline and the waterfall."""
    rows = rows_of(spans)
    if not rows:
        return Text("an empty trace")
    total_ms = max(row.offset_ms + row.duration_ms for row in rows)
    services = list(dict.fromkeys(row.service for row in rows))
    table = Table(box=None, pad_edge=False, padding=(0, 1), expand=False)
    table.add_column("span", no_wrap=True, overflow="ellipsis")
    table.add_column("instance", no_wrap=True, overflow="ellipsis")
    table.add_column("", no_wrap=True, min_width=bar_cells)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in rows:
        colour = _COLOURS[services.index(row.service) % len(_COLOURS)]
        bar = Text(bar_of(row, total_ms, bar_cells), style="red" if row.num_failed else colour)
        table.add_row(_name(row), Text(_plain(row.instance or row.service), colour), bar, _duration(row), _notes(row))
    headline = f"trace {spans[0].trace_id}  {_ms(total_ms)}, {len(spans)} spans, {len(services)} services"
    return Group(Text(headline, style="bold"), table)


def bar_of(row: Row, total_ms: float, cells: int) -> str:
    """`cells` characters; at least one is filled, however short the span."""
    total_ms = total_ms or 1.0
    start = min(cells - 1, int(row.offset_ms / total_ms * cells))
    length = max(1, min(cells - start, round(row.duration_ms / total_ms * cells)))
    return " " * start + ("·" if row.is_event else "━") * length + " " * (cells - start - length)


def _name(row: Row) -> Text:
    text = Text(" " * min(MAX_INDENT, 2 * row.depth) + _plain(row.name))
    if row.count > 1:
        text.append(f" ×{row.count}", style="bold")
    return text


def _duration(row: Row) -> str:
    return "" if row.is_event else f"{row.duration_ms:.1f}"


def _notes(row: Row) -> Text:
    parts = [f"{note.label} {_value(note)}" for note in row.notes]
    text = Text("  ".join(parts), style="dim")
    if row.num_failed:
        failed = f"{row.num_failed} failed: " if row.count > 1 else ""
        text.append(f"{'  ' if parts else ''}✗ {failed}{_plain(row.error)}", style="red")
    return text


def _value(note: Note) -> str:
    if isinstance(note.value, int | float) and note.unit is Unit.BYTES:
        return _bytes(note.value)
    if isinstance(note.value, int | float) and note.unit is Unit.MS:
        return _ms(note.value)
    return _plain(str(note.value))


def _ms(value: float) -> str:
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.1f} ms"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _plain(text: str) -> str:
    """Attributes come from requests: nothing in them may steer the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
