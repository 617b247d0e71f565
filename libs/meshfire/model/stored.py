"""A weight matrix as a checkpoint stores it: plain floats, or a quantized format with its scales.

Owns what every format can do: say its shape, and become float32. How fast a format is multiplied is a compute path's
business; how it lies in files is the reader's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class StoredWeight(Protocol):
    """One matrix [out, in]."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    def dequantized(self) -> Tensor:
        """Its values: [out, in] float32, maybe a view of what is stored."""


@dataclass(frozen=True)
class PlainWeight:
    """Floats of any type, maybe mapped from a file."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, columns = self.values.shape
        return rows, columns

    def dequantized(self) -> Tensor:
        """As float32."""
        return self.values.to(torch.float32)


@dataclass(frozen=True)
class StoredFfn:
    """The three matrices of a SwiGLU as stored: gate and up [I, H], down [H, I]."""

    gate: StoredWeight
    up: StoredWeight
    down: StoredWeight

    @classmethod
    def of(cls, gate: Tensor, up: Tensor, down: Tensor) -> StoredFfn:
        """From plain floats."""
        return cls(PlainWeight(gate), PlainWeight(up), PlainWeight(down))
