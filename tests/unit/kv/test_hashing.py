"""The hash chain: what must and what must not give a block another name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshfire.kv.hashing import HASH_BYTES, HashChain, chain_hashes, num_blocks_for

tokens = st.lists(st.integers(0, 200_000), max_size=40)


def chain(token_ids: list[int], block_tokens: int = 4, revision: str = "r1", salt: str = "") -> list[bytes]:
    return chain_hashes(token_ids, block_tokens, model_revision=revision, cache_salt=salt)


@given(tokens, st.integers(1, 9))
def test_every_block_gets_one_hash_including_the_partial_last(token_ids: list[int], block_tokens: int) -> None:
    hashes = chain(token_ids, block_tokens)
    assert len(hashes) == num_blocks_for(len(token_ids), block_tokens)
    assert all(len(one) == HASH_BYTES for one in hashes)
    assert len(set(hashes)) == len(hashes)


@given(tokens, tokens)
def test_hashes_of_two_prompts_agree_exactly_as_far_as_their_blocks_do(left: list[int], right: list[int]) -> None:
    for index, (mine, theirs) in enumerate(zip(chain(left), chain(right))):
        assert (mine == theirs) == (left[: 4 * index + 4] == right[: 4 * index + 4])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_revision_salt_and_block_size_each_change_every_hash(token_ids: list[int]) -> None:
    base = chain(token_ids)
    for other in (
        chain(token_ids, revision="r2"),
        chain(token_ids, salt="s"),
        chain(token_ids, revision="r", salt="1"),
        chain(token_ids, block_tokens=5),
    ):
        assert not set(base) & set(other)


def test_the_chain_is_a_contract_between_workers_and_does_not_change_silently() -> None:
    assert [one.hex() for one in chain([1, 2, 3, 4, 5], salt="tenant")] == [
        "7328afb9977f30be65407c7fb99b007c",
        "beba2fa124d82437a4f00b213cdd1081",
    ]


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 8), st.integers(0, 30))
def test_a_chain_that_grows_gives_the_same_names(token_ids: list[int], block_tokens: int, first: int) -> None:
    growing = HashChain(block_tokens, model_revision="r", cache_salt="s")
    growing.extend(token_ids[:first])
    growing.extend(token_ids)
    growing.extend(token_ids)
    whole = chain_hashes(token_ids, block_tokens, model_revision="r", cache_salt="s")
    assert growing.hashes == whole[: len(token_ids) // block_tokens]
