"""Names of KV blocks: a hash chained from the first block to the last, the same on every worker of a model.

Owns the chain's definition. Knows nothing of pools, tensors or transport. Two blocks have the same name exactly when
all tokens up to and including theirs, the model revision, the block size and the cache salt are the same, because then
and only then their KV rows are the same.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

HASH_BYTES = 16


def chain_hashes(
    token_ids: Sequence[int], block_tokens: int, *, model_revision: str, cache_salt: str = ""
) -> list[bytes]:
    """One 16-byte hash per block of `block_tokens` tokens, first to last; the last block may be partial.

    Each is blake2b-128 over (parent hash, the block's token ids as little-endian int64); the first parent is a root
    over (block size, revision, salt), each with its length before it, so that no two inputs share their bytes.
    """
    parent = _root(block_tokens, model_revision, cache_salt)
    hashes = []
    for block in _blocks(token_ids, block_tokens):
        parent = _next(parent, block)
        hashes.append(parent)
    return hashes


class HashChain:
    """The names of one sequence's full blocks, made as they fill: the same as `chain_hashes` would give."""

    def __init__(self, block_tokens: int, *, model_revision: str, cache_salt: str = "") -> None:
        self.block_tokens = block_tokens
        #: first to last
        self.hashes: list[bytes] = []
        self._parent = _root(block_tokens, model_revision, cache_salt)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Name the full blocks of `token_ids`, the whole sequence, that have no name yet."""
        start = len(self.hashes) * self.block_tokens
        for first in range(start, len(token_ids) - self.block_tokens + 1, self.block_tokens):
            self._parent = _next(self._parent, _packed(token_ids[first : first + self.block_tokens]))
            self.hashes.append(self._parent)


def num_blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that `num_tokens` tokens need."""
    return -(-num_tokens // block_tokens)


def _root(block_tokens: int, model_revision: str, cache_salt: str) -> bytes:
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=b"meshfire-kv-v1")
    for part in (str(block_tokens), model_revision, cache_salt):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def _blocks(token_ids: Sequence[int], block_tokens: int) -> Iterator[bytes]:
    for start in range(0, len(token_ids), block_tokens):
        yield _packed(token_ids[start : start + block_tokens])


def _packed(block: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(block)}q", *block)


def _next(parent: bytes, block: bytes) -> bytes:
    return hashlib.blake2b(parent + block, digest_size=HASH_BYTES).digest()
