"""Test hook `wants` under a rule: a model that wants to say a text, and may only say what the rule allows.

At each step it says the longest token that continues the text and that the mask allows, else the allowed token with the
lowest id. How far it came is told from the tokens alone, so another worker can go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshfire.grammar.constraint import Mask
from meshfire.text.vocabulary import Vocabulary
from services.decode.ending import Ending, FinishReason


@dataclass(frozen=True)
class WantedText:
    """The text, and what comes after it: an end token where the rule allows one, or the end for length."""

    text: bytes
    ends_with_eos: bool

    def rest_after(self, vocabulary: Vocabulary, output_ids: Sequence[int]) -> bytes:
        """What is still to be said; tokens that do not continue the text were the rule's."""
        rest = self.text
        for token_id in output_ids:
            rest = rest.removeprefix(vocabulary.bytes_of(token_id))
        return rest

    def ending_before(self, vocabulary: Vocabulary, output_ids: Sequence[int]) -> Ending | None:
        """The end for length, once all is said."""
        if self.ends_with_eos or self.rest_after(vocabulary, output_ids):
            return None
        return Ending(FinishReason.LENGTH)


@dataclass(frozen=True)
class Wish:
    """What to say next."""

    vocabulary: Vocabulary
    rest: bytes
    end_token_ids: tuple[int, ...]

    def choice(self, mask: Mask | None) -> int:
        """The token to choose; `mask` [V], None = all are allowed."""
        for token_id in self._liked():
            if mask is None or mask[token_id]:
                return token_id
        return 0 if mask is None else int(np.argmax(mask))

    def _liked(self) -> Sequence[int]:
        """Best first."""
        if not self.rest:
            return self.end_token_ids
        starts = (self.rest[:length] for length in range(len(self.rest), 0, -1))
        return [token_id for start in starts if (token_id := self.vocabulary.token_of(start)) is not None]
