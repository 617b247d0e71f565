"""The reference path: every weight as float32, products by oneDNN where it is there.

Owns the packing of FFNs for it; the row-exact product itself is `linear`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from meshfire.model.linear import linear, pack
from meshfire.model.stored import StoredFfn, StoredWeight

#: inner sizes are padded to whole turns of torch's vector loop (two vectors of 16 floats with AVX-512): its scalar tail
#: rounds exp() differently
_INNER_MULTIPLE = 32


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
class Fp32Gated:
    """Packed gate and up [I, H], I padded; `inner_size` is I without padding."""

    gate: Tensor
    up: Tensor
    inner_size: int

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weights."""
        return sum(one.numel() * one.element_size() for one in (self.gate, self.up))

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, H] → [T, I], float32."""
        return (F.silu(linear(rows, self.gate)) * linear(rows, self.up))[:, : self.inner_size]


@dataclass(frozen=True)
class Fp32Ffn:
    """Both halves, one after the other."""

    gated: Fp32Gated
    down: Fp32Linear

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weights."""
        return self.gated.num_bytes + self.down.num_bytes

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, H] → [T, H], float32."""
        return self.down(self.gated(rows))


class Fp32Compute:
    """Float32 weights and arithmetic on the CPU."""

    name = "fp32"

    def linear(self, weight: StoredWeight, bias: Tensor | None = None) -> Fp32Linear:
        """Pack a matrix [out, in] and a bias [out]."""
        return Fp32Linear(pack(weight.dequantized()), bias)

    def ffn(self, weights: StoredFfn) -> Fp32Ffn:
        """Pack one SwiGLU."""
        return Fp32Ffn(self.gated(weights.gate, weights.up), self.linear(weights.down))

    def gated(self, gate: StoredWeight, up: StoredWeight) -> Fp32Gated:
        """Pack the first half of a SwiGLU; I grows to a multiple of 32 with zeros."""
        inner_size = gate.shape[0]
        padding = (0, 0, 0, -inner_size % _INNER_MULTIPLE)
        packed_gate, packed_up = (pack(F.pad(one.dequantized(), padding)) for one in (gate, up))
        return Fp32Gated(packed_gate, packed_up, inner_size)
