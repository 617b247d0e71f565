"""A vocabulary small enough to try every token: letters, digits, punctuation, a few words, two control tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshfire.text.specials import SpecialToken, SpecialTokens
from meshfire.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class LettersTokenizer:
    """See `meshfire.text.tokenizer.Tokenizer`. Ids follow `pieces`; the last is the end token, before it `<x>`."""

    pieces: Sequence[bytes]
    checksum: str = "letters"
    vocabulary: Vocabulary = field(init=False)
    specials: SpecialTokens = field(init=False)
    end_token_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        size = len(self.pieces)
        controls = [SpecialToken(size, "<x>", hidden=True), SpecialToken(size + 1, "<end>", hidden=True)]
        object.__setattr__(self, "vocabulary", Vocabulary([*self.pieces, b"<x>", b"<end>"]))
        object.__setattr__(self, "specials", SpecialTokens.of(controls))
        object.__setattr__(self, "end_token_ids", (size + 1,))

    def encode_plain(self, text: str, *, at_start: bool = True) -> list[int]:
        """Longest tokens first."""
        found = self.vocabulary.cover(text.encode())
        assert found is not None, f"{text!r} has bytes without a token"
        return found

    def encode_trusted(self, text: str) -> list[int]:
        return self.encode_plain(text)
