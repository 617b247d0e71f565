"""Which output events were handed out already: what a reopened stream says again is cut off.

Events of an output joined in order are the same however they were cut; so a position in them is a number of characters,
with one more for every event that is no text.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshfire.api.tokenizer.v1 import tokenizer_service_pb2 as pb


class EventCursor:
    """Position in one output."""

    def __init__(self) -> None:
        self._num_out = 0
        self._num_to_skip = 0

    def replay(self) -> None:
        """The stream begins anew: everything so far comes again."""
        self._num_to_skip = self._num_out

    def fresh(self, events: Iterable[pb.OutputEvent]) -> tuple[pb.OutputEvent, ...]:
        """What has not been handed out yet."""
        found = (self._cut(event) for event in events)
        return tuple(event for event in found if event is not None)

    def _cut(self, event: pb.OutputEvent) -> pb.OutputEvent | None:
        text = _text_of(event)
        size = 1 if text is None else len(text)
        skipped = min(size, self._num_to_skip)
        self._num_to_skip -= skipped
        self._num_out += size - skipped
        if skipped == size:
            return None
        return event if skipped == 0 or text is None else _with_text(event, text[skipped:])


def _text_of(event: pb.OutputEvent) -> str | None:
    match event.WhichOneof("event"):
        case "reasoning":
            return event.reasoning
        case "content":
            return event.content
        case "call_arguments":
            return event.call_arguments.text
        case _:
            return None


def _with_text(event: pb.OutputEvent, text: str) -> pb.OutputEvent:
    match event.WhichOneof("event"):
        case "reasoning":
            return pb.OutputEvent(reasoning=text)
        case "content":
            return pb.OutputEvent(content=text)
        case _:
            index = event.call_arguments.index
            return pb.OutputEvent(call_arguments=pb.ToolCallArguments(index=index, text=text))
