"""Weights as int8 panels, the layout that `source/int8.cpp` reads.

Owns their quantization: symmetric, one scale per output. Shapes: N outputs, C inputs, I neurons.
"""

from __future__ import annotations

from ctypes import CDLL, c_int64, c_void_p
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

#: outputs of a panel: two groups of 16, see source/int8.cpp
PANEL = 32
#: outputs that are summed side by side
GROUP = PANEL // 2
_MAX_WEIGHT = 127
_MAX_SUM = 2**31 - 1
_MAX_INPUT = 2**15 - 1


@dataclass(frozen=True)
class Int8Matrix:
    """`panels` [N / 32, C / 2, 2, 16, 2] int8, N and C padded with zeros; `scales` [N padded] float32.

    `num_outputs` and `num_inputs` are N and C without padding; of a gated matrix, twice the neurons.
    """

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


def pack(library: CDLL | None, weight: Tensor) -> Int8Matrix:
    """Quantize and lay out `weight` [N, C] of any float type."""
    if library:
        return _pack_native(library, weight, None)
    num_outputs, num_inputs = weight.shape
    values, scales = _quantize_weight(weight)
    return Int8Matrix(_panels(values), F.pad(scales, (0, -num_outputs % PANEL)), num_outputs, num_inputs)


def pack_gated(library: CDLL | None, gate: Tensor, up: Tensor) -> Int8Matrix:
    """Both halves [I, C] of a SwiGLU as one matrix: each panel holds 16 gates and the ups that belong to them."""
    if library:
        return _pack_native(library, gate, up)
    padding = (0, 0, 0, -gate.shape[0] % GROUP)
    paired = torch.stack([F.pad(one, padding).view(-1, GROUP, one.shape[1]) for one in (gate, up)], dim=1)
    values, scales = _quantize_weight(paired.flatten(0, 2))
    return Int8Matrix(_panels(values), scales, 2 * gate.shape[0], gate.shape[1])


def _pack_native(library: CDLL, first: Tensor, second: Tensor | None) -> Int8Matrix:
    """`first` [N, C], with `second` [N, C] in turns of 16 rows if it is given."""
    rows, inputs = first.shape
    both = [one.to(torch.float32).contiguous() for one in (first, second) if one is not None]
    num_panels = -(-rows // PANEL) if second is None else -(-rows // GROUP)
    panels = torch.zeros(num_panels, -(-inputs // 2), 2, GROUP, 2, dtype=torch.int8)
    scales = torch.zeros(num_panels * PANEL)
    function = library.meshfire_int8_pack
    function.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p]
    function.restype = None
    second_at = both[1].data_ptr() if second is not None else None
    function(both[0].data_ptr(), second_at, rows, inputs, panels.data_ptr(), scales.data_ptr())
    return Int8Matrix(panels, scales, rows * len(both), inputs)


def _quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, C] int8 and [N] float32."""
    weight = weight.to(torch.float32)
    greatest = weight.abs().amax(dim=1)
    scales = torch.where(greatest.isfinite(), greatest, torch.nan) / _MAX_WEIGHT
    factors = torch.where(scales > 0, 1 / scales, 0)
    values = torch.where(scales[:, None] > 0, weight * factors[:, None], 0).round_()
    return values.clamp_(-_MAX_WEIGHT, _MAX_WEIGHT).to(torch.int8), scales


def _panels(values: Tensor) -> Tensor:
    """[N, C] int8 → [N / 32, C / 2, 2, 16, 2]."""
    num_outputs, num_inputs = values.shape
    values = F.pad(values, (0, num_inputs % 2, 0, -num_outputs % PANEL))
    split = values.view(values.shape[0] // PANEL, 2, GROUP, values.shape[1] // 2, 2)
    return split.permute(0, 3, 1, 2, 4).contiguous()
