"""Token ids and the bytes they stand for, in both directions. Knows no encoding rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshfire.errors import BadInput


@dataclass(frozen=True)
class Vocabulary:
    """`pieces[i]` are the bytes of token i; empty for an id without a token (models may have more rows than tokens)."""

    pieces: Sequence[bytes]

    @property
    def size(self) -> int:
        """Ids are 0 to size - 1."""
        return len(self.pieces)

    def bytes_of(self, token_id: int) -> bytes:
        """Exact bytes of a token. Raises BadInput(field="token_ids")."""
        if not 0 <= token_id < len(self.pieces):
            raise BadInput(f"token id {token_id} is not in 0..{len(self.pieces) - 1}", field="token_ids")
        return self.pieces[token_id]

    def token_of(self, piece: bytes) -> int | None:
        """The token that is exactly these bytes; the lowest id if several are."""
        return self._ids.get(piece)

    def longest_prefix(self, data: bytes) -> int | None:
        """The longest token that the data begins with."""
        for length in range(min(self._longest, len(data)), 0, -1):
            if (found := self._ids.get(data[:length])) is not None:
                return found
        return None

    def cover(self, data: bytes) -> list[int] | None:
        """Tokens whose bytes together are exactly the data, each the longest possible; None if a byte has no token."""
        token_ids: list[int] = []
        start = 0
        while start < len(data):
            found = self.longest_prefix(data[start : start + self._longest])
            if found is None:
                return None
            token_ids.append(found)
            start += len(self.pieces[found])
        return token_ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        ids: dict[bytes, int] = {}
        for token_id, piece in enumerate(self.pieces):
            if piece:
                ids.setdefault(piece, token_id)
        return ids

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.pieces), default=0)
