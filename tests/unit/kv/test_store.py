"""The KV store against plain indexing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfire.errors import InvalidTensor
from meshfire.kv.store import KvStore
from meshfire.model.interface import KvGeometry

GEOMETRY = KvGeometry(num_layers=3, block_tokens=4, row_width=2)


@given(st.permutations(range(6)), st.integers(1, 24))
def test_rows_written_by_slot_are_read_back_by_block_table(blocks: list[int], num_tokens: int) -> None:
    store = KvStore(GEOMETRY, 6)
    slots = torch.tensor([blocks[position // 4] * 4 + position % 4 for position in range(num_tokens)])
    table = torch.tensor(blocks[: -(-num_tokens // 4)])
    rows = torch.arange(num_tokens * 2, dtype=torch.float32).view(num_tokens, 2)
    for layer in range(3):
        store.write(layer, slots, rows + 100 * layer)
    for layer in range(3):
        assert torch.equal(store.read(layer, table, num_tokens), rows + 100 * layer)


def test_an_exported_block_imports_into_another_store_layer_by_layer() -> None:
    owner, reader = KvStore(GEOMETRY, 2), KvStore(GEOMETRY, 5)
    rows = torch.randn(3, 4, 2)
    owner.import_layers(1, 0, rows)
    block = owner.export_block(1)
    assert torch.equal(block, rows)
    reader.import_layers(4, 0, block[:1])
    reader.import_layers(4, 1, block[1:])
    assert torch.equal(reader.export_block(4), rows)
    assert not reader.export_block(3).any()


def test_an_export_is_a_copy_without_rows_of_earlier_sequences() -> None:
    store = KvStore(GEOMETRY, 1)
    store.import_layers(0, 0, torch.ones(3, 4, 2))
    block = store.export_block(0, num_tokens=3)
    assert block[:, :3].eq(1).all()
    assert not block[:, 3:].any()
    assert store.export_block(0).eq(1).all()


@pytest.mark.parametrize(
    ("layer_start", "rows"),
    [
        (0, torch.zeros(4, 4, 2)),
        (2, torch.zeros(2, 4, 2)),
        (-1, torch.zeros(1, 4, 2)),
        (0, torch.zeros(1, 4, 3)),
        (0, torch.zeros(1, 3, 2)),
        (0, torch.zeros(4, 2)),
        (0, torch.zeros(1, 4, 2, dtype=torch.bfloat16)),
    ],
)
def test_rows_that_do_not_fit_are_refused(layer_start: int, rows: torch.Tensor) -> None:
    with pytest.raises(InvalidTensor):
        KvStore(GEOMETRY, 1).import_layers(0, layer_start, rows)
