"""One output's tokens to text, as they come. Knows nothing of requests; the stop rule is in `stop_strings`.

Characters whose bytes are spread over tokens appear when complete. Bytes that are no UTF-8 become U+FFFD exactly as in
Python's `bytes.decode(errors="replace")`; only a character that is still incomplete at the very end is dropped.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from meshfire.text.specials import SpecialTokens
from meshfire.text.stop_strings import StopHit, StopStrings
from meshfire.text.vocabulary import Vocabulary

_new_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True)
class Decoded:
    """What some tokens added. `num_tokens_used`: of these tokens, up to and including the one that completed a stop."""

    text: str
    stop_hit: str | None
    num_tokens_used: int


class Detokenizer:
    """State of one output. The concatenated texts do not depend on how the tokens were grouped."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        specials: SpecialTokens,
        *,
        stop: Sequence[str] = (),
        keep_special_tokens: bool = False,
    ) -> None:
        """Raises BadInput(field="stop")."""
        self._vocabulary = vocabulary
        self._skipped: Collection[int] = () if keep_special_tokens else specials.hidden_ids
        self._decoder = _new_decoder(errors="replace")
        self._stops = StopStrings(stop)
        self._ended = False

    def add(self, token_ids: Sequence[int], *, last: bool = False) -> Decoded:
        """Text that became certain. Nothing comes after a stop text or after `last`.

        Raises BadInput(field="token_ids"), before any state has changed.
        """
        pieces = [b"" if one in self._skipped else self._vocabulary.bytes_of(one) for one in token_ids]
        if self._ended:
            return Decoded("", None, 0)
        shown: list[str] = []
        for index, piece in enumerate(pieces):
            pushed = self._stops.push(self._decoder.decode(piece))
            if isinstance(pushed, StopHit):
                self._ended = True
                return Decoded("".join(shown) + pushed.text_before, pushed.stop, index + 1)
            shown.append(pushed)
        if last:
            self._ended = True
            shown.append(self._stops.flush())
        return Decoded("".join(shown), None, len(pieces))

    def bytes_of(self, token_ids: Sequence[int]) -> list[bytes]:
        """Exact bytes of tokens, special ones included."""
        return [self._vocabulary.bytes_of(one) for one in token_ids]
