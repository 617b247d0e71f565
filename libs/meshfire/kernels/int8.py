"""Products with int8 weights: native where there is a compiler, else torch with the same bits.

Activations get one scale per row and as many bits as 32-bit sums hold without overflow (15 for 576 inputs, 12 for
7,168). Sums are exact integers, so a row's result is a function of that row alone; the float steps after them are one
rounding each, in one order. Shapes: T rows, N outputs, C inputs, I neurons.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL

from torch import Tensor

from meshfire.kernels import int8_torch
from meshfire.kernels.int8_pack import Int8Matrix
from meshfire.kernels.row_product import RowProduct

Product = Callable[[Tensor], Tensor]


def linear(library: CDLL | None, matrix: Int8Matrix, bias: Tensor | None) -> Product:
    """The product with `matrix`, plus `bias` [N] float32: [T, C] float32 → [T, N] float32."""
    if library is None:
        return lambda rows: int8_torch.linear(rows, matrix, bias)
    arguments = (*_inputs(matrix), bias, matrix.num_outputs)
    return RowProduct(library.meshfire_int8_linear, arguments, matrix.num_outputs)


def gated(library: CDLL | None, matrix: Int8Matrix) -> Product:
    """silu(gate x) · up x with a matrix of `pack_gated`: [T, C] float32 → [T, I] float32."""
    if library is None:
        return lambda rows: int8_torch.gated(rows, matrix)
    num_neurons = matrix.num_outputs // 2
    return RowProduct(library.meshfire_int8_gated, (*_inputs(matrix), num_neurons), num_neurons)


def ffn(library: CDLL | None, first: Int8Matrix, second: Int8Matrix) -> Product:
    """`second` after the gated product with `first`, in one call: [T, C] → [T, C]."""
    if library is None:
        return lambda rows: int8_torch.linear(int8_torch.gated(rows, first), second, None)
    arguments = (*_inputs(first), *_inputs(second), second.num_outputs)
    return RowProduct(library.meshfire_int8_ffn, arguments, second.num_outputs)


def _inputs(matrix: Int8Matrix) -> tuple[int | Tensor, ...]:
    return matrix.num_inputs, matrix.input_limit, matrix.panels, matrix.scales
