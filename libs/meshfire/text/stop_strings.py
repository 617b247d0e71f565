"""Finds the first stop text in an output that grows, and says how much of it can be shown already.

Which of several stop texts wins: the one that is complete first (its last character comes first); among those that
complete at the same character, the one that begins first. So the answer depends on the text only, never on how it was
cut into tokens, and no later token has to be waited for. Serving systems that look once per token, for the earliest
beginning, differ from this only where stop texts overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshfire.errors import BadInput


@dataclass(frozen=True)
class StopHit:
    """A stop text was found; the output ends before it."""

    stop: str
    text_before: str


class StopStrings:
    """State of one output: the text that is held back because a stop text may begin in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises BadInput(field="stop") for an empty stop text."""
        if not all(stops):
            raise BadInput("an empty stop text would end every output at once", field="stop")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""

    @property
    def is_holding(self) -> bool:
        """Whether text waits."""
        return bool(self._held)

    def push(self, text: str) -> str | StopHit:
        """Take more text; return what can be shown now, or the hit."""
        if not self._stops:
            return text
        pending = self._held + text
        hit = self._first(pending)
        if hit is not None:
            self._held = ""
            return hit
        keep = max(_overlap(pending, stop) for stop in self._stops)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """The output ends: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> StopHit | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return StopHit(stop, text[:start])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop text."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
