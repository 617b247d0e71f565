"""The control tokens of a vocabulary: finding them in text, and cutting text at them.

What only consists of white space, or of one character, is text even where a tokenizer lists it as an added token: no
template uses it to control anything, and untrusted text cannot do without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

#: matches nothing
_NEVER = re.compile(r"(?!)")


@dataclass(frozen=True)
class SpecialToken:
    """One control token. `hidden`: left out of decoded text by default (Hugging Face's `special` flag)."""

    token_id: int
    content: str
    hidden: bool = True
    #: white space before / after it belongs to it
    lstrip: bool = False
    rstrip: bool = False


#: A stretch of plain text, or a control token.
Segment: TypeAlias = str | SpecialToken


def is_control(content: str) -> bool:
    """True = text of this kind can be kept from being produced by accident, and has to be."""
    return len(content) > 1 and not content.isspace()


@dataclass(frozen=True)
class SpecialTokens:
    """All control tokens of a vocabulary."""

    tokens: tuple[SpecialToken, ...]

    @classmethod
    def of(cls, tokens: Iterable[SpecialToken]) -> SpecialTokens:
        """Those of the tokens that are control tokens."""
        return cls(tuple(token for token in tokens if is_control(token.content)))

    @cached_property
    def by_content(self) -> dict[str, SpecialToken]:
        """Token of a text."""
        return {token.content: token for token in self.tokens}

    @cached_property
    def ids(self) -> frozenset[int]:
        """All ids."""
        return frozenset(token.token_id for token in self.tokens)

    @cached_property
    def hidden_ids(self) -> frozenset[int]:
        """Ids that decoded text leaves out by default."""
        return frozenset(token.token_id for token in self.tokens if token.hidden)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches any control token, the longest where several begin."""
        longest_first = sorted(self.by_content, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else _NEVER

    @cached_property
    def start_pattern(self) -> re.Pattern[str]:
        """Matches the first character of any control token, also of overlapping ones."""
        rests: dict[str, list[str]] = {}
        for content in self.by_content:
            rests.setdefault(content[0], []).append(re.escape(content[1:]))
        parts = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
        return re.compile("|".join(parts)) if parts else _NEVER

    def split(self, text: str) -> Iterator[Segment]:
        """Control tokens and the texts between them, in order; empty texts are left out."""
        start, left_strip = 0, False
        for match in self.pattern.finditer(text):
            token = self.by_content[match[0]]
            between = _stripped(text[start : match.start()], left=left_strip, right=token.lstrip)
            if between:
                yield between
            yield token
            start, left_strip = match.end(), token.rstrip
        if rest := _stripped(text[start:], left=left_strip, right=False):
            yield rest

    def pieces_without(self, text: str) -> list[str]:
        """The text cut inside every control token, so that no piece contains one."""
        cuts = [0, *(match.end() for match in self.start_pattern.finditer(text)), len(text)]
        return [text[a:b] for a, b in pairwise(cuts) if a < b]


def _stripped(text: str, *, left: bool, right: bool) -> str:
    text = text.lstrip() if left else text
    return text.rstrip() if right else text
