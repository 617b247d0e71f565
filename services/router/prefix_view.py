"""What one worker's prefix cache holds, as its events tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PrefixView:
    """Chain hashes of blocks. May be late by a round trip: a hint, never a promise."""

    def __init__(self) -> None:
        self._hashes: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._hashes)

    def apply(self, *, reset: bool = False, stored: Iterable[bytes] = (), removed: Iterable[bytes] = ()) -> None:
        """Take one event."""
        if reset:
            self._hashes.clear()
        self._hashes.difference_update(removed)
        self._hashes.update(stored)

    def num_found(self, hashes: Sequence[bytes]) -> int:
        """Blocks of the longest prefix of `hashes` that is there. Binary search: a chain's block is of no use, and is
        evicted first, without those before it."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._hashes:
                low = middle
            else:
                high = middle - 1
        return low
