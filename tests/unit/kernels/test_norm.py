"""The compiled norm: what float64 says, in place where it adds, one row like many."""

from __future__ import annotations

import math
import shutil

import pytest
import torch

from meshfire.kernels.native import Kernels, kernels
from meshfire.model.norm import RmsNorm

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
IN_TORCH = Kernels(None, "the test wants torch")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 7, 16, 576, 577, 7168])
def test_compiled_and_torch_have_the_same_bits(size: int) -> None:
    rows, added, weight = noise(33, size), noise(33, size, seed=1), noise(size, 1, seed=2)[:, 0]
    compiled, plain = RmsNorm(weight, 1e-5, kernels()), RmsNorm(weight, 1e-5, IN_TORCH)
    assert torch.equal(compiled(rows), plain(rows))
    assert torch.equal(compiled(rows[:, None])[:, 0], plain(rows))
    sums = [rows.clone(), rows.clone()]
    normed = [norm.after_adding(one, added) for norm, one in zip((compiled, plain), sums, strict=True)]
    assert torch.equal(normed[0], normed[1])
    assert torch.equal(sums[0], rows + added)
    assert torch.equal(sums[1], rows + added)


def test_the_factor_is_that_of_an_exact_sum() -> None:
    rows = noise(20, 577) * 1e3
    out = RmsNorm(torch.ones(577), 1e-6)(rows)
    for row, normed in zip(rows, out, strict=True):
        mean = math.fsum(float(x) ** 2 for x in row) / 577
        assert torch.equal(normed, row * torch.tensor(1 / math.sqrt(mean + 1e-6), dtype=torch.float32))


def test_a_row_is_the_same_alone_and_on_two_threads() -> None:
    rows, norm = noise(70, 576), RmsNorm(noise(576, 1, seed=3)[:, 0], 1e-5)
    whole = norm(rows)
    assert torch.equal(torch.cat([norm(row[None]) for row in rows]), whole)
    kernels().set_threads(2)
    assert torch.equal(norm(rows), whole)
    kernels().set_threads(1)


def test_views_that_are_not_contiguous_are_read_as_they_look() -> None:
    wide, norm = noise(5, 40), RmsNorm(torch.ones(16), 1e-6)
    assert torch.equal(norm(wide[:, 8:24]), norm(wide[:, 8:24].contiguous()))
    assert norm(wide[:0, :16]).shape == (0, 16)
    assert norm(torch.full((1, 16), torch.nan)).isnan().all()
