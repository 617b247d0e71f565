"""Products with bfloat16 weights in compiled code: half of float32's memory, float32 sums in one order.

There is no twin in torch: it has no way to add one by one. Where there is no compiler the caller computes in float32.
Shapes: T rows, N outputs, C inputs, I neurons.
"""

from __future__ import annotations

from ctypes import CDLL

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfire.kernels.row_product import RowProduct

_PANEL = 32
_GROUP = _PANEL // 2


def pack(weight: Tensor) -> Tensor:
    """`weight` [N, C] of any float type, rounded to bfloat16 → [N / 32, C, 32], N padded with zeros."""
    padded = F.pad(weight.to(torch.bfloat16), (0, 0, 0, -weight.shape[0] % _PANEL))
    return padded.view(-1, _PANEL, weight.shape[1]).transpose(1, 2).contiguous()


def pack_gated(gate: Tensor, up: Tensor) -> Tensor:
    """Both halves [I, C] of a SwiGLU: each panel holds 16 gates and the ups that belong to them."""
    padding = (0, 0, 0, -gate.shape[0] % _GROUP)
    halves = [F.pad(one.to(torch.bfloat16), padding).view(-1, _GROUP, one.shape[1]) for one in (gate, up)]
    return torch.cat(halves, dim=1).transpose(1, 2).contiguous()


def linear(library: CDLL, panels: Tensor, bias: Tensor | None, num_outputs: int) -> RowProduct:
    """The product with `panels` of `pack`, plus `bias` [N] float32: [T, C] float32 → [T, N] float32."""
    arguments = (panels.shape[1], panels, bias, num_outputs)
    return RowProduct(library.meshfire_bf16_linear, arguments, num_outputs)


def gated(library: CDLL, panels: Tensor, num_neurons: int) -> RowProduct:
    """silu(gate x) · up x with `panels` of `pack_gated`: [T, C] float32 → [T, I] float32."""
    return RowProduct(library.meshfire_bf16_gated, (panels.shape[1], panels, num_neurons), num_neurons)


def ffn(library: CDLL, first: Tensor, second: Tensor, num_outputs: int) -> RowProduct:
    """`second` (of `pack`) after the gated product with `first`, in one call: [T, C] → [T, N]."""
    arguments = (first.shape[1], first, second.shape[1], second, num_outputs)
    return RowProduct(library.meshfire_bf16_ffn, arguments, num_outputs)
