"""The int8 path: a quarter of float32's memory, products of exact integer sums.

Owns how weights are grouped into products; arithmetic is `meshfire.kernels.int8`'s. Weights of any stored format are
quantized anew, one scale per output.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meshfire.kernels import int8
from meshfire.kernels.int8_pack import Int8Matrix, pack, pack_gated
from meshfire.kernels.native import Kernels
from meshfire.model.stored import StoredFfn, StoredWeight


@dataclass(frozen=True)
class Int8Linear:
    """`matrix` and `bias` are what `product` reads."""

    matrix: Int8Matrix
    bias: Tensor | None
    product: int8.Product

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight."""
        return self.matrix.num_bytes

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, in] → [T, out], float32."""
        return self.product(rows)


@dataclass(frozen=True)
class Int8Gated:
    """Gate and up in one matrix."""

    matrix: Int8Matrix
    product: int8.Product

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weights."""
        return self.matrix.num_bytes

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, H] → [T, I], float32."""
        return self.product(rows)


@dataclass(frozen=True)
class Int8Ffn:
    """Both halves in one call."""

    first: Int8Matrix
    second: Int8Matrix
    product: int8.Product

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weights."""
        return self.first.num_bytes + self.second.num_bytes

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, H] → [T, H], float32."""
        return self.product(rows)


class Int8Compute:
    """Int8 weights, 12 to 15-bit activations, on the CPU."""

    name = "int8"

    def __init__(self, kernels: Kernels) -> None:
        self._library = kernels.library

    def linear(self, weight: StoredWeight, bias: Tensor | None = None) -> Int8Linear:
        """Pack a matrix [out, in] and a bias [out]."""
        matrix = pack(self._library, weight.dequantized())
        return Int8Linear(matrix, bias, int8.linear(self._library, matrix, bias))

    def ffn(self, weights: StoredFfn) -> Int8Ffn:
        """Pack one SwiGLU."""
        first = pack_gated(self._library, weights.gate.dequantized(), weights.up.dequantized())
        second = pack(self._library, weights.down.dequantized())
        return Int8Ffn(first, second, int8.ffn(self._library, first, second))

    def gated(self, gate: StoredWeight, up: StoredWeight) -> Int8Gated:
        """Pack the first half of a SwiGLU."""
        matrix = pack_gated(self._library, gate.dequantized(), up.dequantized())
        return Int8Gated(matrix, int8.gated(self._library, matrix))
