"""No prompt is ever given a block with another prefix's or another tenant's content, however blocks come and go."""

from __future__ import annotations

from contextlib import ExitStack

from hypothesis import given, settings
from hypothesis import strategies as st

from meshfire.errors import NoFreeBlocks
from meshfire.kv.block_pool import BlockPool
from meshfire.kv.hashing import chain_hashes
from services.prefill.blocks import SequenceBlocks

PROMPTS = st.lists(
    st.tuples(st.sampled_from(["", "a", "b"]), st.lists(st.integers(0, 1), min_size=1, max_size=9), st.booleans()),
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(PROMPTS)
def test_a_reused_block_holds_the_same_salt_and_the_same_tokens_from_the_first(
    prompts: list[tuple[str, list[int], bool]],
) -> None:
    pool, content = BlockPool(7), {}
    with ExitStack() as held:
        for salt, token_ids, stays in prompts:
            hashes = chain_hashes(token_ids, 2, model_revision="r", cache_salt=salt)
            blocks = SequenceBlocks(pool, hashes, len(token_ids), 2)
            try:
                held.enter_context(blocks)
            except NoFreeBlocks:
                continue
            num_cached = blocks.num_cached_tokens // 2
            for index, block in enumerate(blocks.blocks):
                written = (salt, tuple(token_ids[: 2 * (index + 1)]))
                if index < num_cached:
                    assert content[block] == written
                content[block] = written
            blocks.publish_up_to(len(token_ids))
            if not stays:
                held.close()
            pool.check()
    assert pool.num_free == 7
