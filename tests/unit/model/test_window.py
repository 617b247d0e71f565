"""Sliding-window attention, tile by tile and chunk by chunk, against plain loops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshfire.model import attention, registry
from tests.oracles import make_mistral_checkpoint
from tests.unit.model.harness import Runner


def by_hand(queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int) -> Tensor:
    first = keys.shape[0] - queries.shape[0]
    rows = []
    for index, query in enumerate(queries):
        position = first + index
        seen = slice(max(0, position - window + 1) if window else 0, position + 1)
        per_head = []
        for head, one in enumerate(query):
            group = head // (query.shape[0] // keys.shape[1])
            weights = torch.softmax(keys[seen, group] @ one * scale, dim=0)
            per_head.append(weights @ values[seen, group])
        rows.append(torch.stack(per_head))
    return torch.stack(rows)


@pytest.mark.parametrize("max_scores", [1, 200, 2**23])
@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize("num_queries", [1, 3, 30])
def test_every_row_sees_its_window(
    window: int, num_queries: int, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_MAX_SCORES", max_scores)
    generator = torch.Generator().manual_seed(window)
    queries, keys, values = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((num_queries, 4, 8), (30, 2, 8), (30, 2, 6))
    )
    found = attention.attend(queries, keys, values, 0.3, window)
    torch.testing.assert_close(found, by_hand(queries, keys, values, 0.3, window), rtol=1e-12, atol=1e-12)


def test_chunks_and_single_steps_give_the_same_bits(tmp_path: Path) -> None:
    directory = make_mistral_checkpoint(tmp_path, sliding_window=9)
    assert registry.describe(directory).window_tokens == 9
    runner, ids = Runner.open(directory), list(range(3, 43))
    whole = runner.prefill(ids, 40)
    for chunk in (1, 7, 9, 10):
        assert torch.equal(runner.prefill(ids, chunk), whole)
