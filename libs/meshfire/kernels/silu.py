"""silu from single roundings, step for step as `source/silu.h`: the same bits with and without compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

_TAYLOR = (1.38888889e-3, 8.33333333e-3, 4.16666667e-2, 1.66666667e-1, 0.5, 1.0, 1.0)


def exp_strict(x: Tensor) -> Tensor:
    """exp of float32 values held within [-87, 87]; NaN stays NaN."""
    x = x.clamp(-87.0, 87.0)
    n = (x * 1.44269504).round()
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    p = torch.full_like(x, 1.98412698e-4)
    for coefficient in _TAYLOR:
        p = p * r + coefficient
    return p * torch.ldexp(torch.ones_like(x), n)


def silu_strict(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))."""
    return x / (1.0 + exp_strict(-x))
