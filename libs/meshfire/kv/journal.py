"""What a block pool can share, as a stream of changes: for whoever places work where its prefix is.

Owns that changes come in order and that what came and went between two reads is not told. Knows no wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CacheChanges:
    """Hashes of blocks that can be shared now and of blocks that no longer can; none is in both."""

    stored: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed)


class BlockJournal:
    """Written by the pool, read by one reader. Lives on the event loop."""

    def __init__(self) -> None:
        self._shared: dict[bytes, None] = {}
        #: True = stored since the last read, False = removed
        self._changed: dict[bytes, bool] = {}

    def stored(self, block_hash: bytes) -> None:
        """A block can be shared from now on."""
        self._shared[block_hash] = None
        self._change(block_hash, stored=True)

    def removed(self, block_hash: bytes) -> None:
        """A block cannot be shared any more."""
        self._shared.pop(block_hash, None)
        self._change(block_hash, stored=False)

    def drain(self) -> CacheChanges:
        """Changes since the last call."""
        changed, self._changed = self._changed, {}
        return CacheChanges(
            [block_hash for block_hash, stored in changed.items() if stored],
            [block_hash for block_hash, stored in changed.items() if not stored],
        )

    def shared(self) -> list[bytes]:
        """Everything that can be shared now, changes that were not read included."""
        return list(self._shared)

    def _change(self, block_hash: bytes, *, stored: bool) -> None:
        if self._changed.get(block_hash) is (not stored):
            del self._changed[block_hash]
        else:
            self._changed[block_hash] = stored
