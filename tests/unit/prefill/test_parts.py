"""The small pure parts of a prefill worker."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfire.errors import Cancelled, DeadlineExceeded, NoFreeBlocks, Unavailable
from meshfire.kv.block_pool import BlockPool
from meshfire.kv.hashing import chain_hashes
from meshfire.model.interface import KvGeometry
from services.prefill.blocks import SequenceBlocks
from services.prefill.chunks import batch_of, chunks_of
from services.prefill.config import PrefillSettings
from services.prefill.prompt import Stop


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 70))
def test_chunks_tile_the_rest_of_a_prompt_without_gap_or_overlap(start: int, length: int, chunk_tokens: int) -> None:
    chunks = list(chunks_of(start, start + length, chunk_tokens))
    assert [position for one in chunks for position in range(one.start, one.stop)] == list(range(start, start + length))
    assert all(0 < one.num_tokens <= chunk_tokens for one in chunks)
    assert [one.index for one in chunks] == list(range(len(chunks)))


@given(st.permutations(range(8)), st.integers(1, 4), st.integers(0, 20), st.integers(1, 12))
def test_every_token_of_a_step_goes_to_its_own_slot(blocks: list[int], size: int, start: int, length: int) -> None:
    stop = min(start + length, 8 * size)
    for chunk in chunks_of(start, stop, length):
        batch = batch_of(chunk, list(range(100, 200)), blocks, size)
        expected = [blocks[position // size] * size + position % size for position in range(start, stop)]
        assert batch.slots.tolist() == expected
        assert batch.positions.tolist() == list(range(start, stop))
        assert batch.token_ids.tolist() == [100 + position for position in range(start, stop)]
        (sequence,) = batch.sequences
        assert (sequence.start, sequence.stop, sequence.context_tokens) == (0, stop - start, stop)
        assert sequence.block_table.tolist() == blocks[: -(-stop // size)]


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(0, 20)), max_size=8))
def test_blocks_of_prompts_that_break_off_anywhere_are_all_given_back(prompts: list[tuple[list[int], int]]) -> None:
    pool = BlockPool(6)
    for token_ids, num_computed in prompts:
        hashes = chain_hashes(token_ids, 4, model_revision="r")
        with SequenceBlocks(pool, hashes, len(token_ids), 4) as blocks:
            assert blocks.num_cached_tokens < len(token_ids)
            assert len(blocks.blocks) == len(hashes)
            blocks.publish_up_to(min(num_computed, len(token_ids)))
        pool.check()
        assert pool.num_free == 6
        assert pool.num_matched(hashes) >= min(num_computed, len(token_ids)) // 4


def test_a_prompt_without_room_gives_back_the_prefix_that_it_had_matched() -> None:
    pool = BlockPool(3)
    hashes = chain_hashes(list(range(12)), 4, model_revision="r")
    with SequenceBlocks(pool, hashes, 12, 4) as blocks:
        blocks.publish_up_to(12)
    with pytest.raises(NoFreeBlocks), SequenceBlocks(pool, [*hashes, b"x"], 16, 4):
        pass
    pool.check()
    assert pool.num_free == 3


def test_the_first_reason_to_stop_stands() -> None:
    stop = Stop(time.monotonic() + 60)
    stop.check()
    stop.set(Cancelled("first"))
    stop.set(Unavailable("second"))
    with pytest.raises(Cancelled):
        stop.check()


async def test_a_sleep_ends_with_the_deadline_or_when_stopped() -> None:
    with pytest.raises(DeadlineExceeded):
        await Stop(time.monotonic() + 0.01).sleep(60)
    stop = Stop(time.monotonic() + 60)
    asyncio.get_running_loop().call_later(0.01, stop.set, Cancelled("gone"))
    with pytest.raises(Cancelled):
        await stop.sleep(60)
    await Stop(time.monotonic() + 60).sleep(0.001)


def test_kv_memory_is_given_in_blocks_or_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = KvGeometry(num_layers=2, block_tokens=4, row_width=8)
    monkeypatch.setenv("MESHFIRE_PREFILL_MODEL", "m")
    monkeypatch.setenv("MESHFIRE_PREFILL_MODEL_DIR", "/models/m")
    monkeypatch.setenv("MESHFIRE_PREFILL_KV_CACHE_BYTES", str(geometry.block_bytes * 7 + 5))
    assert PrefillSettings().blocks_of(geometry) == 7  # type: ignore[call-arg]
    monkeypatch.setenv("MESHFIRE_PREFILL_NUM_KV_BLOCKS", "3")
    assert PrefillSettings().blocks_of(geometry) == 3  # type: ignore[call-arg]
    monkeypatch.setenv("MESHFIRE_PREFILL_NUM_KV_BLOCKS", "0")
    monkeypatch.setenv("MESHFIRE_PREFILL_KV_CACHE_BYTES", "1")
    assert PrefillSettings().blocks_of(geometry) == 1  # type: ignore[call-arg]
