"""Calling a compiled function on rows: what every native product has in common. Knows no format of weights."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor


class RowProduct:
    """`function(rows, count, *arguments, out)`: [T, in] float32 → [T, `num_outputs`] float32.

    `arguments` are whole numbers (int64), tensors (their address) and None (a null pointer); tensors live as long as
    this does. A call costs about two microseconds beside the allocation of its output.
    """

    def __init__(self, function: Any, arguments: Sequence[int | Tensor | None], num_outputs: int) -> None:
        self._held = arguments
        self._arguments = tuple(one.data_ptr() if isinstance(one, Tensor) else one for one in arguments)
        self._num_outputs = num_outputs
        kinds = [c_int64 if isinstance(one, int) else c_void_p for one in arguments]
        function.argtypes = [c_void_p, c_int64, *kinds, c_void_p]
        function.restype = None
        self._function = function

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` must be float32 of the width that the function was told."""
        rows = rows.contiguous()
        num_rows = rows.shape[0]
        out = torch.empty(num_rows, self._num_outputs)
        self._function(rows.data_ptr(), num_rows, *self._arguments, out.data_ptr())
        return out
