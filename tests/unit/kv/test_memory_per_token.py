"""What a token's KV takes: Kimi K2.5's published figures, and the store's own memory."""

from __future__ import annotations

import pytest
import torch

from meshfire.kv.store import KvStore
from meshfire.model.interface import KvGeometry

CONTEXT_TOKENS = 262_144


def test_kimi_k25_takes_its_latent_and_rotated_key_per_layer() -> None:
    geometry = KvGeometry(num_layers=61, block_tokens=16, row_width=512 + 64, dtype=torch.bfloat16)
    assert geometry.token_bytes == 70_272
    assert geometry.block_bytes * (CONTEXT_TOKENS // 16) / 2**30 == pytest.approx(17.16, abs=0.005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_store_takes_what_its_geometry_says_and_no_more(dtype: torch.dtype) -> None:
    geometry = KvGeometry(num_layers=3, block_tokens=4, row_width=5, dtype=dtype)
    store = KvStore(geometry, 7)
    assert store.blocks.nbytes == 7 * geometry.block_bytes == 7 * 4 * geometry.token_bytes
