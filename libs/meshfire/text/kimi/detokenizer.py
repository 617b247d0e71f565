"""Decodes one output of Kimi's language as it grows: the parser's events, and stop texts in the content.

Owns where stop texts count: in content, never in reasoning or arguments, and not across a tool call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshfire.text.kimi.events import Content, Event
from meshfire.text.kimi.output import OutputParser
from meshfire.text.stop_strings import StopHit, StopStrings


@dataclass(frozen=True)
class ChatDecoded:
    """What some tokens added. `num_tokens_used`: of these tokens, up to and including the one that completed a stop."""

    events: list[Event]
    stop_hit: str | None
    num_tokens_used: int
    num_reasoning_tokens: int = 0


class ChatDetokenizer:
    """State of one output."""

    def __init__(self, parser: OutputParser, stop: Sequence[str] = ()) -> None:
        """Raises BadInput(field="stop")."""
        self._parser = parser
        self._stops = StopStrings(stop)
        self._ended = False

    def add(self, token_ids: Sequence[int], *, last: bool = False) -> ChatDecoded:
        """Events that became certain. Nothing comes after a stop text or after `last`.

        Raises BadInput(field="token_ids"), before any state has changed.
        """
        self._parser.check(token_ids)
        events: list[Event] = []
        if self._ended:
            return ChatDecoded(events, None, 0)
        before = self._parser.num_reasoning_tokens
        stop_hit, num_used = self._decode(token_ids, last, events)
        return ChatDecoded(events, stop_hit, num_used, self._parser.num_reasoning_tokens - before)

    def _decode(self, token_ids: Sequence[int], last: bool, events: list[Event]) -> tuple[str | None, int]:
        for index, token_id in enumerate(token_ids):
            hit = self._take(self._parser.add([token_id]), events)
            if hit is not None:
                return hit, index + 1
        if last:
            self._ended = True
            hit = self._take(self._parser.finish(), events)
            if hit is not None:
                return hit, len(token_ids)
            self._release(events)
        return None, len(token_ids)

    def _take(self, parsed: Sequence[Event], events: list[Event]) -> str | None:
        """Pass events on; the stop text that ended the content."""
        for event in parsed:
            if not isinstance(event, Content):
                self._release(events)
                events.append(event)
                continue
            pushed = self._stops.push(event.text)
            if isinstance(pushed, StopHit):
                self._ended = True
                _content(pushed.text_before, events)
                return pushed.stop
            _content(pushed, events)
        return None

    def _release(self, events: list[Event]) -> None:
        _content(self._stops.flush(), events)


def _content(text: str, events: list[Event]) -> None:
    if text:
        events.append(Content(text))
