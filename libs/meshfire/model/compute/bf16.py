"""The bf16 path: weights rounded to bfloat16 and kept so, float32 arithmetic.

Owns how weights are grouped into products; arithmetic is `meshfire.kernels.bf16`'s. A checkpoint in bfloat16 loses
nothing. Needs compiled kernels: without them `choose` takes float32 products of the rounded weights.
"""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import dataclass

import torch
from torch import Tensor

from meshfire.kernels import bf16
from meshfire.kernels.row_product import RowProduct
from meshfire.model.compute.fp32 import Fp32Compute, Fp32Ffn, Fp32Gated, Fp32Linear
from meshfire.model.stored import PlainWeight, StoredFfn, StoredWeight


@dataclass(frozen=True)
class Bf16Product:
    """Any of the products: rows in, rows out. `num_bytes` is the memory of its weights."""

    product: RowProduct
    num_bytes: int

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, in] → [T, out], float32."""
        return self.product(rows)


class Bf16Compute:
    """Bfloat16 weights on the CPU."""

    name = "bf16"

    def __init__(self, library: CDLL) -> None:
        self._library = library

    def linear(self, weight: StoredWeight, bias: Tensor | None = None) -> Bf16Product:
        """Pack a matrix [out, in] and a bias [out]."""
        panels = bf16.pack(weight.dequantized())
        return Bf16Product(bf16.linear(self._library, panels, bias, weight.shape[0]), panels.nbytes)

    def ffn(self, weights: StoredFfn) -> Bf16Product:
        """Pack one SwiGLU."""
        first = bf16.pack_gated(weights.gate.dequantized(), weights.up.dequantized())
        second = bf16.pack(weights.down.dequantized())
        product = bf16.ffn(self._library, first, second, weights.down.shape[0])
        return Bf16Product(product, first.nbytes + second.nbytes)

    def gated(self, gate: StoredWeight, up: StoredWeight) -> Bf16Product:
        """Pack the first half of a SwiGLU."""
        panels = bf16.pack_gated(gate.dequantized(), up.dequantized())
        return Bf16Product(bf16.gated(self._library, panels, gate.shape[0]), panels.nbytes)


class RoundedFp32Compute:
    """Weights rounded to bfloat16, kept and multiplied as float32: what `bf16` means without a compiler."""

    name = "bf16"

    def __init__(self) -> None:
        self._fp32 = Fp32Compute()

    def linear(self, weight: StoredWeight, bias: Tensor | None = None) -> Fp32Linear:
        """Round and pack a matrix [out, in] and a bias [out]."""
        return self._fp32.linear(_rounded(weight), bias)

    def ffn(self, weights: StoredFfn) -> Fp32Ffn:
        """Round and pack one SwiGLU."""
        return self._fp32.ffn(StoredFfn(_rounded(weights.gate), _rounded(weights.up), _rounded(weights.down)))

    def gated(self, gate: StoredWeight, up: StoredWeight) -> Fp32Gated:
        """Round and pack the first half of a SwiGLU."""
        return self._fp32.gated(_rounded(gate), _rounded(up))


def _rounded(weight: StoredWeight) -> PlainWeight:
    return PlainWeight(weight.dequantized().to(torch.bfloat16))
