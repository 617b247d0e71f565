"""Int8 products in torch: the bits of `source/int8.cpp` where there is no compiler, and the tests' oracle.

Slow: weights become float64 in each call, panel by panel, because memory is what int8 is for.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfire.kernels.int8_pack import GROUP, Int8Matrix
from meshfire.kernels.silu import silu_strict

_LEAST = 1e-30
_PANELS_AT_ONCE = 64


def quantize_rows(rows: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """[T, C] float32 → integers [T, C] int32 and scales [T, 1] float32, NaN for a row that is not finite."""
    greatest = rows.abs().amax(dim=1, keepdim=True)
    small = greatest < _LEAST
    usable = torch.where(small | ~greatest.isfinite(), 1, greatest)
    scales = torch.where(greatest.isfinite(), torch.where(small, 0, greatest) / limit, torch.nan)
    factors = torch.full_like(usable, limit) / usable  # a number divided by a tensor would be rounded twice
    values = torch.where(small | ~greatest.isfinite(), 0, rows * factors).round()
    return values.to(torch.int32), scales


def linear(rows: Tensor, matrix: Int8Matrix, bias: Tensor | None) -> Tensor:
    """As `int8.linear`."""
    product = _product(rows, matrix)[:, : matrix.num_outputs]
    return product if bias is None else product + bias


def gated(rows: Tensor, matrix: Int8Matrix) -> Tensor:
    """As `int8.gated`."""
    paired = _product(rows, matrix).view(rows.shape[0], -1, 2, GROUP)
    neurons = (silu_strict(paired[:, :, 0]) * paired[:, :, 1]).flatten(1)
    return neurons[:, : matrix.num_outputs // 2]


def _product(rows: Tensor, matrix: Int8Matrix) -> Tensor:
    """[T, N padded] float32. float64 holds every partial sum exactly, so its order does not matter."""
    values, scales = quantize_rows(rows, matrix.input_limit)
    inputs = F.pad(values, (0, matrix.num_inputs % 2)).to(torch.float64)
    shares = []
    for panels in torch.split(matrix.panels, _PANELS_AT_ONCE):
        weights = panels.permute(0, 2, 3, 1, 4).reshape(-1, inputs.shape[1]).to(torch.float64)
        shares.append((inputs @ weights.T).to(torch.float32))
    return torch.cat(shares, dim=1) * scales * matrix.scales
