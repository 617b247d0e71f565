"""Root-mean-square normalisation. Owns its precision; knows nothing of where it stands in a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from meshfire.kernels.native import Kernels, kernels
from meshfire.kernels.norm import NativeRmsNorm


class RmsNorm:
    """x / sqrt(mean(x²) + eps) · weight. `weight` [D] float32.

    The mean is taken in float64, so its summation order cannot show. `compiled`: the kernels to use, else this
    process's own.
    """

    def __init__(self, weight: Tensor, eps: float, compiled: Kernels | None = None) -> None:
        self.weight = weight.to(torch.float32).contiguous()
        self.eps = eps
        library = (compiled or kernels()).library
        self._native = NativeRmsNorm(library, self.weight, eps) if library else None

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., D] → [..., D] float32; `rows` stay as they are."""
        if self._native:
            return self._native(rows.contiguous(), None)
        mean = rows.to(torch.float64).square().mean(-1, keepdim=True)
        return rows * torch.rsqrt(mean + self.eps).to(torch.float32) * self.weight

    def after_adding(self, rows: Tensor, added: Tensor | None) -> Tensor:
        """Add `added` [T, D] to contiguous `rows` [T, D] in place, unless it is None; the norm of the sum."""
        if self._native:
            return self._native(rows, None if added is None else added.contiguous())
        if added is not None:
            rows += added
        return self(rows)
