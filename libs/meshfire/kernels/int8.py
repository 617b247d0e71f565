"""Products with int8 weights: native where there is a compiler, else torch with the same bits.

Weights: symmetric, one scale per output. Activations: one scale per row, as many bits as 32-bit sums hold without
overflow (15 for 576 inputs, 12 for 7,168). Sums are exact integers, so a row's result is a function of that row alone;
the float steps after them are one rounding each, in one order. Shapes: T rows, N outputs, C inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfire.kernels.silu import silu_strict

#: outputs of a panel: two groups of 16, see source/int8.cpp
PANEL = 32
_GROUP = PANEL // 2
_MAX_WEIGHT = 127
_MAX_SUM = 2**31 - 1
_MAX_INPUT = 2**15 - 1
_LEAST = 1e-30
_FALLBACK_PANELS = 64


@dataclass(frozen=True)
class Int8Matrix:
    """`panels` [N / 32, C / 2, 2, 16, 2] int8, N and C padded with zeros; `scales` [N padded] float32."""

    panels: Tensor
    scales: Tensor
    num_outputs: int
    num_inputs: int

    @property
    def num_bytes(self) -> int:
        """Memory of weights and scales."""
        return self.panels.numel() + 4 * self.scales.numel()

    @property
    def input_limit(self) -> int:
        """The greatest size of a quantized input with which no sum can overflow."""
        return min(_MAX_INPUT, _MAX_SUM // (_MAX_WEIGHT * self.num_inputs))


def pack(weight: Tensor) -> Int8Matrix:
    """Quantize and lay out `weight` [N, C] of any float type."""
    num_outputs, num_inputs = weight.shape
    values, scales = _quantize_weight(weight)
    return Int8Matrix(_panels(values), F.pad(scales, (0, -num_outputs % PANEL)), num_outputs, num_inputs)


def pack_gated(gate: Tensor, up: Tensor) -> Int8Matrix:
    """Both halves [I, C] of a SwiGLU as one matrix: each panel holds 16 gates and the ups that belong to them."""
    padding = (0, 0, 0, -gate.shape[0] % _GROUP)
    paired = torch.stack([F.pad(one, padding).view(-1, _GROUP, one.shape[1]) for one in (gate, up)], dim=1)
    return pack(paired.flatten(0, 2))


def _quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, C] int8 and [N] float32."""
    weight = weight.to(torch.float32)
    scales = weight.abs().amax(dim=1) / _MAX_WEIGHT
    factors = torch.where(scales > 0, 1 / scales, 0)
    return (weight * factors[:, None]).round_().clamp_(-_MAX_WEIGHT, _MAX_WEIGHT).to(torch.int8), scales


def _panels(values: Tensor) -> Tensor:
    """[N, C] int8 → [N / 32, C / 2, 2, 16, 2]."""
    num_outputs, num_inputs = values.shape
    values = F.pad(values, (0, num_inputs % 2, 0, -num_outputs % PANEL))
    split = values.view(values.shape[0] // PANEL, 2, _GROUP, values.shape[1] // 2, 2)
    return split.permute(0, 3, 1, 2, 4).contiguous()


def linear(library: CDLL | None, matrix: Int8Matrix, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The product with `matrix`, plus `bias` [N] float32: [T, C] float32 → [T, N] float32."""
    if library is None:
        return lambda rows: _torch_linear(rows, matrix, bias)
    function = library.meshfire_int8_linear
    function.argtypes = [c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_void_p]
    function.restype = None
    inputs, limit, outputs = matrix.num_inputs, matrix.input_limit, matrix.num_outputs
    panels, scales = matrix.panels.data_ptr(), matrix.scales.data_ptr()
    bias_at = None if bias is None else bias.data_ptr()

    def call(rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        num_rows = rows.shape[0]
        out = rows.new_empty(num_rows, outputs)
        function(rows.data_ptr(), num_rows, inputs, limit, panels, scales, bias_at, outputs, out.data_ptr())
        return out

    return call


def gated(library: CDLL | None, matrix: Int8Matrix) -> Callable[[Tensor], Tensor]:
    """silu(gate x) · up x with a matrix of `pack_gated`: [T, C] float32 → [T, I padded to 16] float32."""
    if library is None:
        return lambda rows: _torch_gated(rows, matrix)
    function = library.meshfire_int8_gated
    function.argtypes = [c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_int64, c_void_p]
    function.restype = None
    inputs, limit, neurons = matrix.num_inputs, matrix.input_limit, matrix.num_outputs // 2
    panels, scales = matrix.panels.data_ptr(), matrix.scales.data_ptr()

    def call(rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        num_rows = rows.shape[0]
        out = rows.new_empty(num_rows, neurons)
        function(rows.data_ptr(), num_rows, inputs, limit, panels, scales, neurons, out.data_ptr())
        return out

    return call


def quantize_rows(rows: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """[T, C] float32 → integers [T, C] int32 and scales [T, 1] float32, NaN for a row that is not finite."""
    greatest = rows.abs().amax(dim=1, keepdim=True)
    small = greatest < _LEAST
    usable = torch.where(small | ~greatest.isfinite(), 1, greatest)
    scales = torch.where(greatest.isfinite(), torch.where(small, 0, greatest) / limit, torch.nan)
    factors = torch.full_like(usable, limit) / usable  # a number divided by a tensor would be rounded twice
    values = torch.where(small | ~greatest.isfinite(), 0, rows * factors).round()
    return values.to(torch.int32), scales


def _torch_linear(rows: Tensor, matrix: Int8Matrix, bias: Tensor | None) -> Tensor:
    product = _torch_product(rows, matrix)[:, : matrix.num_outputs]
    return product if bias is None else product + bias


def _torch_gated(rows: Tensor, matrix: Int8Matrix) -> Tensor:
    paired = _torch_product(rows, matrix).view(rows.shape[0], -1, 2, _GROUP)
    neurons = (silu_strict(paired[:, :, 0]) * paired[:, :, 1]).flatten(1)
    return neurons[:, : matrix.num_outputs // 2]


def _torch_product(rows: Tensor, matrix: Int8Matrix) -> Tensor:
    """[T, N padded] float32. float64 holds every partial sum exactly, so its order does not matter."""
    values, scales = quantize_rows(rows, matrix.input_limit)
    inputs = F.pad(values, (0, matrix.num_inputs % 2)).to(torch.float64)
    shares = []
    for panels in matrix.panels.split(_FALLBACK_PANELS):
        weights = panels.permute(0, 2, 3, 1, 4).reshape(-1, inputs.shape[1]).to(torch.float64)
        shares.append((inputs @ weights.T).to(torch.float32))
    return torch.cat(shares, dim=1) * scales * matrix.scales
