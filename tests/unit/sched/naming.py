"""Sequences for tests."""

from __future__ import annotations

from meshfire.kv.hashing import HashChain
from meshfire.sched.sequence import Sequence

P = 4


def sequence_of(
    token_ids: list[int], num_prompt_tokens: int | None = None, *, kv_comes: bool = False, block_tokens: int = P
) -> Sequence:
    chain = HashChain(block_tokens, model_revision="r")
    return Sequence(list(token_ids), num_prompt_tokens or len(token_ids), chain, kv_comes=kv_comes)
