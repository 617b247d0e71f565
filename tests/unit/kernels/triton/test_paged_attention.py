"""Paged attention: plain softmax over gathered rows as oracle, and bits that no batch, chunk or page order changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshfire.kernels.triton import paged_attention as kernel
from meshfire.kernels.triton.paged_attention import Queries, RowLayout, paged_attention

BLOCK = 4
LATENT, ROPE = 24, 8


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of a test have several pieces."""
    monkeypatch.setattr(kernel, "SPLIT_TOKENS", 64)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step_of(parts: list[tuple[int, int]], tables: Tensor, max_context: int) -> Queries:
    """Parts are (sequence, position)."""
    sequence, position = (torch.tensor(column, dtype=torch.int32) for column in zip(*parts, strict=True))
    return Queries(sequence, position, tables, BLOCK, max_context)


def tables_of(num_sequences: int, max_blocks: int, seed: int) -> Tensor:
    order = torch.randperm(num_sequences * max_blocks, generator=torch.Generator().manual_seed(seed))
    return order.view(num_sequences, max_blocks).to(torch.int32)


def plain(queries: Tensor, rows: Tensor, layout: RowLayout, step: Queries, scale: float) -> Tensor:
    """Token by token, head by head, in float64."""
    output = torch.empty(*queries.shape[:2], layout.value)
    heads_each = queries.shape[1] // layout.num_groups
    for token, (sequence, position) in enumerate(zip(step.sequence.tolist(), step.position.tolist(), strict=True)):
        places = torch.arange(position + 1)
        slots = step.block_tables[sequence][places // BLOCK].long() * BLOCK + places % BLOCK
        context = rows[slots].double()
        for head in range(queries.shape[1]):
            group = head // heads_each
            keys = context[:, group * layout.key : (group + 1) * layout.key]
            shared = context[:, layout.shared_at : layout.shared_at + layout.shared]
            values = context[:, layout.value_at + group * layout.value :][:, : layout.value]
            weights = torch.softmax(torch.cat((keys, shared), 1) @ queries[token, head].double() * scale, dim=0)
            output[token, head] = (weights @ values).float()
    return output


LAYOUTS = [
    pytest.param(RowLayout.latent(LATENT, ROPE), 5, LATENT + ROPE, LATENT + ROPE, id="latent"),
    pytest.param(RowLayout.grouped(2, 16), 6, 16, 64, id="grouped"),
]


@pytest.mark.parametrize(("layout", "heads", "query_width", "row_width"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_softmax_attention(
    layout: RowLayout, heads: int, query_width: int, row_width: int, dtype: torch.dtype
) -> None:
    tables = tables_of(3, 50, seed=1)
    rows = normal(150 * BLOCK, row_width, seed=2).to(dtype)
    step = step_of([(0, 0), (1, 63), (1, 64), (2, 170), (0, 7)], tables, 171)
    queries = normal(5, heads, query_width, seed=3).to(dtype)
    expected = plain(queries.float(), rows.float(), layout, step, 0.3)
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2  # bf16: weights are rounded to it before their product
    seen = paged_attention(queries, rows, layout, step, 0.3)
    torch.testing.assert_close(seen, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("layout", "heads", "query_width", "row_width"), LAYOUTS)
def test_a_token_has_the_same_bits_in_any_batch_and_with_any_blocks(
    layout: RowLayout, heads: int, query_width: int, row_width: int
) -> None:
    tables = tables_of(2, 60, seed=4)
    rows = normal(120 * BLOCK, row_width, seed=5)
    parts = [(0, 130), (1, 200), (0, 131), (1, 5)]
    queries = normal(4, heads, query_width, seed=6)
    together = paged_attention(queries, rows, layout, step_of(parts, tables, 201), 0.2)
    for index, part in enumerate(parts):
        # alone, with another bound of the context, so another number of pieces
        alone = paged_attention(queries[index : index + 1], rows, layout, step_of([part], tables, part[1] + 1), 0.2)
        assert torch.equal(alone[0], together[index])
    moved = torch.flip(tables, dims=(0, 1))
    places = torch.arange(60 * BLOCK)
    elsewhere = torch.empty_like(rows)
    for sequence in range(2):
        slots, targets = (one[sequence][places // BLOCK].long() * BLOCK + places % BLOCK for one in (tables, moved))
        elsewhere[targets] = rows[slots]
    assert torch.equal(paged_attention(queries, elsewhere, layout, step_of(parts, moved, 201), 0.2), together)


def test_blocks_behind_the_context_are_never_read() -> None:
    layout = RowLayout.latent(LATENT, ROPE)
    tables = tables_of(1, 10, seed=7)
    rows = normal(40, LATENT + ROPE, seed=8)
    queries = normal(1, 3, LATENT + ROPE, seed=9)
    expected = paged_attention(queries, rows, layout, step_of([(0, 9)], tables, 10), 1.0)
    broken = tables.clone()
    broken[0, 3:] = 2**30
    assert torch.equal(paged_attention(queries, rows, layout, step_of([(0, 9)], broken, 10), 1.0), expected)
