"""Root-mean-square normalisation. Owns its precision; knows nothing of where it stands in a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RmsNorm:
    """x / sqrt(mean(x²) + eps) · weight. `weight` [D] float32."""

    weight: Tensor
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., D] → [..., D] float32. The mean is taken in float64, so its summation order cannot show."""
        mean = rows.to(torch.float64).square().mean(-1, keepdim=True)
        return rows * torch.rsqrt(mean + self.eps).to(torch.float32) * self.weight
