"""The matrix product: float64 as oracle, and rows that know nothing of each other."""

from __future__ import annotations

import pytest
import torch

from meshfire.kernels.triton.matmul import matmul


def bf16(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 64, 64), (5, 70, 33), (65, 129, 100), (0, 8, 8)])
def test_it_is_the_product(rows: int, inner: int, columns: int) -> None:
    left, right = bf16(rows, inner, seed=1), bf16(columns, inner, seed=2)
    expected = (left.double() @ right.double().T).float()
    torch.testing.assert_close(matmul(left, right), expected, rtol=1e-5, atol=1e-4)


def test_a_row_does_not_feel_what_its_neighbours_are() -> None:
    """In the interpreter a row's place in its tile shows (numpy's BLAS); the rows around it must not."""
    left, right = bf16(70, 200, seed=3), bf16(48, 200, seed=4)
    others = bf16(70, 200, seed=5)
    others[10:66] = left[10:66]
    assert torch.equal(matmul(others, right)[10:66], matmul(left, right)[10:66])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: only its own dot is known to be exact")
def test_a_row_has_the_same_bits_in_any_company() -> None:
    left, right = bf16(70, 200, seed=3).cuda(), bf16(48, 200, seed=4).cuda()
    whole = matmul(left, right)
    for start, stop in ((0, 1), (3, 10), (60, 70)):
        assert torch.equal(matmul(left[start:stop].contiguous(), right), whole[start:stop])
