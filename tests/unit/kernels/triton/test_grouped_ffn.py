"""Grouped expert FFNs, bf16 and INT4: against one expert at a time, each value unpacked by the layout's definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshfire.kernels.triton.grouped_ffn import ExpertMatrices, grouped_ffn
from meshfire.kernels.triton.routing import plan_tiles
from meshfire.kernels.triton.tile import ROWS

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: only its own dot is known to be exact")

EXPERTS, HIDDEN, INNER = 5, 64, 96


def bf16(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(torch.bfloat16)


def plain_matrices() -> list[ExpertMatrices]:
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    return [ExpertMatrices(bf16(EXPERTS, *shape, seed=index, scale=0.2)) for index, shape in enumerate(shapes)]


def packed(seed: int, rows: int, columns: int) -> ExpertMatrices:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31 - 1, (EXPERTS, rows, columns // 8), generator=generator, dtype=torch.int32)
    scales = torch.rand(EXPERTS, rows, columns // 32, generator=generator) * 0.02 + 0.01
    return ExpertMatrices(words, scales.to(torch.bfloat16))


def unpacked(matrices: ExpertMatrices) -> Tensor:
    """The layout's definition, value by value."""
    assert matrices.scales is not None
    nibbles = torch.stack([(matrices.values >> (4 * place)) & 15 for place in range(8)], dim=-1).flatten(-2) - 8
    return nibbles.to(torch.bfloat16) * matrices.scales.repeat_interleave(32, dim=-1)


def one_by_one(rows: Tensor, topk_ids: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    output = torch.zeros(*topk_ids.shape, rows.shape[1])
    for token, ids in enumerate(topk_ids.tolist()):
        for column, expert in enumerate(ids):
            if expert >= 0:
                row = rows[token].double()
                inner = torch.nn.functional.silu(gate[expert].double() @ row) * (up[expert].double() @ row)
                output[token, column] = (down[expert].double() @ inner.to(torch.bfloat16).double()).float()
    return output


def choices(num_tokens: int, top_k: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(num_tokens)])
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    return ids.to(torch.int32)


@pytest.mark.parametrize("quantized", [False, True])
def test_every_choice_is_its_experts_output(quantized: bool) -> None:
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    matrices = [packed(index, *shape) for index, shape in enumerate(shapes)] if quantized else plain_matrices()
    weights = [unpacked(one) if quantized else one.values for one in matrices]
    rows, ids = bf16(9, HIDDEN, seed=7), choices(9, 2, seed=8)
    seen = grouped_ffn(rows, ids, *matrices)
    # bf16 rounding of an inner number may fall to the other side where float32 and float64 sums differ
    torch.testing.assert_close(seen, one_by_one(rows, ids, *weights), rtol=2e-3, atol=2e-3)
    assert torch.equal(seen[ids == -1], torch.zeros(int((ids == -1).sum()), HIDDEN))


def test_a_token_does_not_feel_what_its_neighbours_are() -> None:
    """In the interpreter a row's place in its tile shows (numpy's BLAS); the tokens around it must not."""
    matrices = plain_matrices()
    rows, ids = bf16(70, HIDDEN, seed=9), choices(70, 3, seed=10)
    whole = grouped_ffn(rows, ids, *matrices)
    others = bf16(70, HIDDEN, seed=11)
    others[20:40] = rows[20:40]
    assert torch.equal(grouped_ffn(others, ids, *matrices)[20:40], whole[20:40])


@on_gpu
def test_a_token_has_the_same_bits_in_any_batch() -> None:
    matrices = [ExpertMatrices(one.values.cuda()) for one in plain_matrices()]
    rows, ids = bf16(70, HIDDEN, seed=9).cuda(), choices(70, 3, seed=10).cuda()
    whole = grouped_ffn(rows, ids, *matrices)
    for start, stop in ((0, 1), (5, 23), (69, 70)):
        part = grouped_ffn(rows[start:stop].contiguous(), ids[start:stop].contiguous(), *matrices)
        assert torch.equal(part, whole[start:stop])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-1, EXPERTS), max_size=3 * ROWS))
def test_tiles_cover_every_choice_exactly_once(ids: list[int]) -> None:
    plan = plan_tiles(torch.tensor(ids, dtype=torch.int32)[:, None], EXPERTS)
    covered: list[int] = []
    for expert, first, last in zip(plan.expert.tolist(), plan.first.tolist(), plan.last.tolist(), strict=True):
        if expert == EXPERTS:
            continue
        assert first < last, "no empty tile names an expert"
        mine = plan.order[first : min(first + ROWS, last)].tolist()
        assert all(ids[choice] == expert for choice in mine)
        covered += mine
    assert sorted(covered) == [choice for choice, expert in enumerate(ids) if 0 <= expert < EXPERTS]
