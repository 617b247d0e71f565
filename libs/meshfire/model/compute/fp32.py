"""The reference path: every weight as float32, products by oneDNN where it is there.

Owns the packing of FFNs for it; the row-exact product itself is `linear`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from meshfire.model.linear import linear, pack
from meshfire.model.stored import StoredFfn, StoredWeight

#: inner sizes are padded to whole SIMD vectors: a vector loop's scalar tail rounds exp() differently
_INNER_MULTIPLE = 16


@dataclass(frozen=True)
class Fp32Linear:
    """`weight` [out, in] as `pack` made it, `bias` [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight."""
        return self.weight.numel() * self.weight.element_size()

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, in] → [T, out], float32."""
        return linear(rows, self.weight, self.bias)


@dataclass(frozen=True)
class Fp32Ffn:
    """Packed gate and up [I, H], down [H, I]."""

    gate: Tensor
    up: Tensor
    down: Tensor

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weights."""
        return sum(one.numel() * one.element_size() for one in (self.gate, self.up, self.down))

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, H] → [T, H], float32."""
        inner = F.silu(linear(rows, self.gate)) * linear(rows, self.up)
        return linear(inner, self.down)


class Fp32Compute:
    """Float32 weights and arithmetic on the CPU."""

    name = "fp32"

    def linear(self, weight: StoredWeight, bias: Tensor | None = None) -> Fp32Linear:
        """Pack a matrix [out, in] and a bias [out]."""
        return Fp32Linear(pack(weight.dequantized()), bias)

    def ffn(self, weights: StoredFfn) -> Fp32Ffn:
        """Pack one SwiGLU; I grows to a multiple of 16 with zeros, which add nothing."""
        gate, up, down = (one.dequantized() for one in (weights.gate, weights.up, weights.down))
        spare = -gate.shape[0] % _INNER_MULTIPLE
        rows, columns = (0, 0, 0, spare), (0, spare)
        return Fp32Ffn(pack(F.pad(gate, rows)), pack(F.pad(up, rows)), pack(F.pad(down, columns)))
