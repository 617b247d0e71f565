"""RMS normalisation in compiled code. Knows nothing of where it stands in a layer."""

from __future__ import annotations

from ctypes import CDLL, c_double, c_int64, c_void_p

import torch
from torch import Tensor


class NativeRmsNorm:
    """`weight` [D] float32, contiguous; it lives as long as this does."""

    def __init__(self, library: CDLL, weight: Tensor, eps: float) -> None:
        self._held = weight
        self._size = weight.numel()
        self._last = (weight.data_ptr(), eps)
        self._function = library.meshfire_rms_norm
        self._function.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_double, c_void_p]
        self._function.restype = None

    def __call__(self, rows: Tensor, added: Tensor | None) -> Tensor:
        """Add `added` [..., D] to `rows` [..., D] in place unless it is None; the norm of that. Contiguous float32."""
        out = torch.empty(rows.shape)
        added_at = None if added is None else added.data_ptr()
        num_rows = rows.numel() // self._size
        self._function(rows.data_ptr(), added_at, num_rows, self._size, *self._last, out.data_ptr())
        return out
