"""Kimi's output as a state machine over token ids.

    REASONING ──</think>──▶ CONTENT ──section──▶ PREAMBLE ──call──▶ HEADER ──arguments──▶ ARGUMENTS
        └──────────────section or call──────────────┘  ▲                                     │
                                 CONTENT ◀──section end─┴──────────────call end──────────────┘

The start state comes from the rendered prompt: a prompt that ends in <think> begins in REASONING. The model may open a
tool section while it thinks, which ends the thinking. Markers count as token ids, never as text: what an answer spells
out is text. Joined by kind, the events are the same however the tokens came in. Knows no stop texts and no wire.
"""

from __future__ import annotations

import codecs
import enum
from collections.abc import Sequence

from meshfire.text.kimi.arguments import ArgumentText
from meshfire.text.kimi.call_ids import kimi_id
from meshfire.text.kimi.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from meshfire.text.kimi.headers import Functions
from meshfire.text.kimi.markers import SPELLED, Marker, Markers
from meshfire.text.stop_strings import StopStrings
from meshfire.text.vocabulary import Vocabulary

_new_decoder = codecs.getincrementaldecoder("utf-8")


class State(enum.Enum):
    """Where in its output the model is."""

    REASONING = "reasoning"
    CONTENT = "content"
    PREAMBLE = "preamble"  # in a tool section, in no call: text there is noise
    HEADER = "header"
    ARGUMENTS = "arguments"


class OutputParser:
    """State of one output. `first_call`: the number in the conversation of the first call that it makes."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        markers: Markers,
        *,
        start: State,
        functions: Functions | None = None,
        first_call: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        self._markers = markers
        self._functions = functions or Functions()
        self._first_call = first_call
        self._state = start
        self._decoder = _new_decoder(errors="replace")
        # a misspelt section marker is only looked for where calls may come
        self._spelled = StopStrings(tuple(SPELLED) if functions is not None and functions.parameters else ())
        self._blank = ""  # white space that is only shown if text follows it
        self._said_something = False  # content other than white space
        self._num_calls = 0
        #: tokens so far that were reasoning, its markers included
        self.num_reasoning_tokens = 0
        self._header = ""
        self._unnamed = False  # the open call's function is not known yet
        self._arguments = ArgumentText()

    @property
    def num_calls(self) -> int:
        """Calls that were announced."""
        return self._num_calls

    def check(self, token_ids: Sequence[int]) -> None:
        """Raises BadInput(field="token_ids") for an id outside the vocabulary; changes nothing."""
        for token_id in token_ids:
            self._vocabulary.bytes_of(token_id)

    def add(self, token_ids: Sequence[int]) -> list[Event]:
        """What some tokens meant. Raises BadInput(field="token_ids") for an id outside the vocabulary."""
        events: list[Event] = []
        for token_id in token_ids:
            self.num_reasoning_tokens += self._state is State.REASONING
            marker = self._markers.by_id.get(token_id)
            if marker is None:
                self._text(self._decoder.decode(self._vocabulary.bytes_of(token_id)), events)
            else:
                self._flush(events)
                self._mark(marker, events)
        return events

    def finish(self) -> list[Event]:
        """The output ended: everything held back. A call that was cut off keeps the arguments that it had."""
        events: list[Event] = []
        self._flush(events)
        if self._state is State.ARGUMENTS:
            self._last_arguments(self._arguments.cut(), events)
        elif self._blank and self._state is State.CONTENT and not self._num_calls:
            events.append(Content(self._blank))
        return events

    # --- text ---------------------------------------------------------------------------------------------------------

    def _flush(self, events: list[Event]) -> None:
        """Nothing completes a character, or a spelt marker, across a marker or the end: half a character is dropped."""
        self._decoder.reset()
        self._plain(self._spelled.flush(), events)

    def _text(self, text: str, events: list[Event]) -> None:
        """Text of any state; looks for spelt markers, all of which begin with "<"."""
        if "<" not in text and not self._spelled.is_holding:
            self._plain(text, events)
            return
        for character in text:
            pushed = self._spelled.push(character)
            if isinstance(pushed, str):
                self._plain(pushed, events)
            else:
                self._plain(pushed.text_before, events)
                self._mark(SPELLED[pushed.stop], events)

    def _plain(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        if self._state is State.REASONING:
            self._reasoning(text, events)
        elif self._state is State.CONTENT:
            self._content(text, events)
        elif self._state is State.HEADER:
            self._header += text
        elif self._state is State.ARGUMENTS:
            self._show_arguments(self._arguments.push(text), events)

    def _content(self, text: str, events: list[Event]) -> None:
        """Leading white space waits: alone, beside tool calls, it is none of the answer."""
        if not self._said_something:
            self._blank += text
            if not self._blank.strip():
                return
            text, self._blank, self._said_something = self._blank, "", True
        events.append(Content(text))

    def _reasoning(self, text: str, events: list[Event]) -> None:
        """White space at the end of reasoning is dropped, so it waits for what follows."""
        pending = self._blank + text
        certain = pending.rstrip()
        self._blank = pending[len(certain) :]
        if certain:
            events.append(Reasoning(certain))

    def _show_arguments(self, text: str, events: list[Event]) -> None:
        if text and not self._unnamed:
            events.append(CallArguments(self._num_calls - 1, text))

    # --- markers ------------------------------------------------------------------------------------------------------

    def _mark(self, marker: Marker, events: list[Event]) -> None:
        if marker is Marker.THINK_BEGIN:
            self._think(events)
        elif marker is Marker.THINK_END:
            if self._state is State.REASONING:
                self._enter(State.CONTENT)
        elif marker is Marker.ARGUMENTS_BEGIN:
            if self._state is State.HEADER:
                self._open_arguments(events)
        else:
            self._leave_call(events)
            if marker is Marker.CALL_BEGIN:
                self._enter(State.HEADER)
                self._header = ""
            elif marker is Marker.SECTION_BEGIN:
                self._enter(State.PREAMBLE)
            elif marker is Marker.SECTION_END and self._state is State.PREAMBLE:
                self._enter(State.CONTENT)
            # a call's end, or a section's end outside of one, changes nothing more

    def _think(self, events: list[Event]) -> None:
        """Thinking may begin anew between content, not inside a call."""
        if self._state is State.CONTENT and not self._said_something:
            self._enter(State.REASONING)

    def _enter(self, state: State) -> None:
        self._state = state
        self._blank, self._said_something = "", False

    def _open_arguments(self, events: list[Event]) -> None:
        self._enter(State.ARGUMENTS)
        self._arguments = ArgumentText()
        name = self._functions.named(self._header)
        self._unnamed = name is None
        if name is not None:
            self._announce(name, events)

    def _announce(self, name: str, events: list[Event]) -> None:
        events.append(CallBegin(self._num_calls, kimi_id(name, self._first_call + self._num_calls), name))
        self._num_calls += 1
        if self._unnamed:
            self._unnamed = False
            if self._arguments.text:
                events.append(CallArguments(self._num_calls - 1, self._arguments.text))

    def _last_arguments(self, rest: str, events: list[Event]) -> None:
        if self._unnamed:
            self._announce(self._functions.guessed(self._header, self._arguments.text), events)
        else:
            self._show_arguments(rest, events)

    def _leave_call(self, events: list[Event]) -> None:
        """A call that was open is complete; a header without arguments is a call without any."""
        if self._state is State.HEADER and self._header.strip():
            self._open_arguments(events)
        if self._state is State.ARGUMENTS:
            self._last_arguments(self._arguments.finish(), events)
            events.append(CallEnd(self._num_calls - 1, self._arguments.is_valid))
        if self._state in (State.HEADER, State.ARGUMENTS):
            self._enter(State.PREAMBLE)
