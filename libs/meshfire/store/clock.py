"""Wall-clock time as the store keeps it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

#: seconds since 1970; tests bring their own
Clock = Callable[[], float]

wall_clock: Clock = time.time


def millis(seconds: float) -> int:
    """Milliseconds since 1970."""
    return int(seconds * 1000)


def utc_day(seconds: float) -> str:
    """The UTC date, `2026-12-01`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


def seconds_to_midnight(seconds: float) -> float:
    """Until 00:00 UTC, when daily allowances begin anew."""
    return 86_400 - seconds % 86_400
