"""Server-sent events: bytes of a stream. Knows no dialect and no transport."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # nginx would hold the events back otherwise
    "x-accel-buffering": "no",
}
DONE = b"data: [DONE]\n\n"

#: Not escaped by JSON, yet line ends to clients that cut a stream with `str.splitlines`.
_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def to_json(payload: Mapping[str, Any]) -> bytes:
    """Compact UTF-8 JSON without a raw line end inside. NaN and infinity are a defect: ValueError."""
    text = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_LINE_ENDS).encode()


def event(payload: Mapping[str, Any]) -> bytes:
    """One event."""
    return b"data: " + to_json(payload) + b"\n\n"


def events(payloads: Iterable[Mapping[str, Any]]) -> bytes:
    """Several events in one write."""
    return b"".join(event(one) for one in payloads)
