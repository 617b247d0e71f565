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
        parent = hashlib.blake2b(parent + block, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


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
        block = token_ids[start : start + block_tokens]
        yield struct.pack(f"<{len(block)}q", *block)
