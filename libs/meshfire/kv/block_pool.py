"""Who uses which KV block: reference counts, the prefix cache, and what is evicted when room is needed.

Owns block numbers only; it knows nothing of tensors, tokens or leases. A block is in exactly one of three places:

    in use    references > 0                       sequences and offered leases hold it
    cached    references = 0, published            its KV may be shared again; evicted least recently used first
    free      references = 0, never published      its content means nothing

`allocate` takes free blocks first, then evicts cached ones. `release` puts a published block into the cache and any
other back onto the free list. Not thread-safe: it lives on the event loop.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from meshfire.errors import InternalError, NoFreeBlocks
from meshfire.kv.journal import BlockJournal


class BlockPool:
    """Blocks `0 … num_blocks - 1` of one KV store. `journal` is told what can be shared."""

    def __init__(self, num_blocks: int, journal: BlockJournal | None = None) -> None:
        self.num_blocks = num_blocks
        self._journal = journal
        self._references = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # first = next to be evicted
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now: free or evictable."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses but that can be matched."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; all or none. Raises NoFreeBlocks."""
        if count > self.num_free:
            raise NoFreeBlocks(
                f"{count} KV blocks wanted, {self.num_free} of {self.num_blocks} are free or can be evicted",
                metadata={"wanted_blocks": str(count), "free_blocks": str(self.num_free)},
            )
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each. Raises InternalError for a block that nobody holds."""
        wanted = list(blocks)
        self._require_held(wanted)
        for block in wanted:
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each. Raises InternalError (and changes nothing) for a block that nobody holds.

        A sequence's blocks are passed first to last; they enter the cache last to first, so that eviction takes the
        tail of a prefix before its head: a tail without its head could never be matched.
        """
        self._require_held(blocks)
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._retire(block)

    def publish(self, block: int, block_hash: bytes) -> bool:
        """Make a held block findable under its hash. False if another block has it already: the first one stays."""
        self._require_held([block])
        if self._block_of.setdefault(block_hash, block) != block:
            return False
        if self._hash_of.setdefault(block, block_hash) != block_hash:
            del self._block_of[block_hash]
            raise InternalError(f"block {block} is already published under another hash")
        if self._journal is not None:
            self._journal.stored(block_hash)
        return True

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest published prefix of `hashes`, each with one more reference for the caller."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        for block in found:
            self._cached.pop(block, None)
            self._references[block] += 1
        return found

    def num_matched(self, hashes: Sequence[bytes]) -> int:
        """Length of the prefix that `match` would find; takes nothing."""
        for length, block_hash in enumerate(hashes):
            if block_hash not in self._block_of:
                return length
        return len(hashes)

    def check(self) -> None:
        """Raise InternalError unless every block is in exactly one place and the two hash maps agree."""
        free, cached = set(self._free), set(self._cached)
        held = {block for block, references in enumerate(self._references) if references > 0}
        if sorted([*self._free, *self._cached, *held]) != list(range(self.num_blocks)):
            raise InternalError(f"blocks lost or doubled: free {free}, cached {cached}, in use {held}")
        if {block_hash: block for block, block_hash in self._hash_of.items()} != self._block_of:
            raise InternalError("hash → block and block → hash disagree")
        if not cached <= self._hash_of.keys() or free & self._hash_of.keys() or min(self._references, default=0) < 0:
            raise InternalError("a cached block without a hash, a free one with one, or a negative reference count")

    def _take(self) -> int:
        if self._free:
            return self._free.popleft()
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        if self._journal is not None:
            self._journal.removed(block_hash)
        return block

    def _retire(self, block: int) -> None:
        if block in self._hash_of:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _require_held(self, blocks: Sequence[int]) -> None:
        if len(set(blocks)) != len(blocks):
            raise InternalError(f"blocks named twice in one call: {list(blocks)}")
        for block in blocks:
            if not 0 <= block < self.num_blocks or self._references[block] == 0:
                raise InternalError(f"block {block} of {self.num_blocks} is not in use")
