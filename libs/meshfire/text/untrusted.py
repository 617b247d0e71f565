"""Carries untrusted strings through a template so that nothing in them can become a control token.

A mark, a Unicode noncharacter that no input contains, is put inside every control token that a string spells out, and
where a string could complete one together with its surroundings. The template handles the strings as ever: the mark is
neither white space nor a letter. In the rendered text every control token left is the template's own; then the marks
go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshfire.errors import InvalidPrompt
from meshfire.text.specials import Segment, SpecialTokens

#: U+FDD0..U+FDEF, and the last two code points of the supplementary planes: no character, ever
_MARKS = tuple(map(chr, [*range(0xFDD0, 0xFDF0), *(0x10000 * plane + end for plane in range(1, 17) for end in (0xFFFE, 0xFFFF))]))  # fmt: skip  # noqa: E501


@dataclass(frozen=True)
class Guard:
    """One mark for one rendering."""

    mark: str
    specials: SpecialTokens

    @classmethod
    def against(cls, values: Any, specials: SpecialTokens) -> Guard:
        """A guard whose mark does not occur in the values. Raises InvalidPrompt if they contain every mark."""
        used = set().union(*map(set, _strings(values)))
        for mark in _MARKS:
            if mark not in used:
                return cls(mark, specials)
        raise InvalidPrompt("the text contains every Unicode noncharacter", field="messages")

    def message(self, value: Any, *, key: str = "") -> Any:
        """A message, or a part of one, marked. Templates compare `role` and `type`, so the edges of these stay."""
        if isinstance(value, str):
            inside = self._inside(value)
            return inside if key in ("role", "type") else self._edges(inside, value)
        if isinstance(value, Mapping):
            return {self._inside(str(name)): self.message(one, key=str(name)) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.message(one, key=key) for one in value]
        return value

    def option(self, value: Any) -> Any:
        """A variable of the template, marked inside its strings; templates compare them, so their edges stay."""
        if isinstance(value, str):
            return self._inside(value)
        if isinstance(value, Mapping):
            return {self._inside(str(name)): self.option(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.option(one) for one in value]
        return value

    def segments(self, rendered: str) -> list[Segment]:
        """Control tokens and plain texts of a rendered template, without marks."""
        parts = (self._unmarked(segment) for segment in self.specials.split(rendered))
        return [part for part in parts if part]

    def _unmarked(self, segment: Segment) -> Segment:
        return segment.replace(self.mark, "") if isinstance(segment, str) else segment

    def _inside(self, text: str) -> str:
        return self.specials.start_pattern.sub(lambda match: match[0] + self.mark, text)

    def _edges(self, marked: str, original: str) -> str:
        """Templates may strip white space, so it is not counted as an edge."""
        core = original.strip()
        if core and self._fragments.may_go_on(core):
            body = marked.rstrip()
            marked = body + self.mark + marked[len(body) :]
        if core and self._fragments.may_complete(core):
            body = marked.lstrip()
            marked = marked[: len(marked) - len(body)] + self.mark + body
        return marked

    @cached_property
    def _fragments(self) -> _Fragments:
        return _Fragments(tuple(self.specials.by_content))


@dataclass(frozen=True)
class _Fragments:
    """Proper parts of control tokens."""

    contents: tuple[str, ...]

    def may_go_on(self, text: str) -> bool:
        """The text ends like the beginning of a control token."""
        return any(text[-length:] in self._beginnings for length in range(1, min(self._longest, len(text)) + 1))

    def may_complete(self, text: str) -> bool:
        """The text begins like the end of a control token, or is a part out of the middle of one."""
        if any(text[:length] in self._ends for length in range(1, min(self._longest, len(text)) + 1)):
            return True
        return len(text) < self._longest and any(text in content for content in self.contents)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(content[:end] for content in self.contents for end in range(1, len(content)))

    @cached_property
    def _ends(self) -> frozenset[str]:
        return frozenset(content[start:] for content in self.contents for start in range(1, len(content)))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.contents), default=0)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(value))
        yield from _strings(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _strings(one)
