"""Guesses of an output's next tokens, which one step then verifies: right ones save steps, wrong ones cost rows.

Owns who guesses and how far. A drafter sees token ids and nothing else, and what it says changes no output: tokens are
chosen as ever, and a guess only tells which of them can be computed in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class Drafter(Protocol):
    """One per output; may keep what it has seen."""

    def draft(self, token_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        """At most `max_tokens` ids that may follow `token_ids`, prompt and output so far; none = no idea."""


class PromptLookup:
    """What followed the last time that the same few tokens came (Saxena, "Prompt lookup decoding", 2023).

    Texts that quote their prompt, and code, go on as they did before. A draft that reaches the end of the text goes on
    with itself, as a text with a period does. A step costs O(new tokens), whatever the length.
    """

    #: tokens that must be the same; longest first
    _LENGTHS = (4, 3)

    def __init__(self) -> None:
        self._num_seen = 0
        #: place after the latest occurrence of some tokens
        self._next: dict[tuple[int, ...], int] = {}

    def draft(self, token_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        self._catch_up(token_ids)
        for length in self._LENGTHS:
            place = self._next.get(tuple(token_ids[-length:])) if len(token_ids) >= length else None
            if place is not None:
                period = len(token_ids) - place
                return [token_ids[place + index % period] for index in range(max_tokens)]
        return ()

    def _catch_up(self, token_ids: Sequence[int]) -> None:
        """Note what precedes each new token. The text's own end precedes nothing yet: it would find itself."""
        for length in self._LENGTHS:
            for place in range(max(self._num_seen, length), len(token_ids)):
                self._next[tuple(token_ids[place - length : place])] = place
        self._num_seen = len(token_ids)


#: by name of the setting `speculation`
DRAFTERS: Mapping[str, Callable[[], Drafter]] = {"prompt-lookup": PromptLookup}


class DraftPace:
    """How far to guess: twice as far when all was right, half as far when nothing was."""

    def __init__(self, drafter: Drafter, max_tokens: int) -> None:
        self._drafter = drafter
        self._max_tokens = max_tokens
        self._num_next = max_tokens

    def draft(self, token_ids: Sequence[int], room: int) -> tuple[int, ...]:
        """At most `room` ids."""
        wanted = min(self._num_next, room)
        return tuple(self._drafter.draft(token_ids, wanted)[:wanted]) if wanted > 0 else ()

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """How the last draft did."""
        if num_drafted and num_accepted == num_drafted:
            self._num_next = min(self._max_tokens, 2 * self._num_next)
        elif num_drafted and num_accepted == 0:
            self._num_next = max(1, self._num_next // 2)
