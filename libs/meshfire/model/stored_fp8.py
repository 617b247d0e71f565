"""Eight-bit floats (e4m3) with one scale for each block of 128 x 128: DeepSeek-V3's and Kimi K2's release format.

Owns the blocks: a block at the lower or right edge may be smaller. Nothing is widened before it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_SIZE = 128


@dataclass(frozen=True)
class Fp8Weight:
    """A matrix [out, in], or a cut of one: `values` [out, in] float8_e4m3fn, `scale` [R, C] of the blocks it touches.

    The first block begins `skipped_rows` above and `skipped_columns` left of the matrix (0 unless cut inside a block).
    """

    values: Tensor
    scale: Tensor
    skipped_rows: int = 0
    skipped_columns: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, columns = self.values.shape
        return rows, columns

    @property
    def num_bytes(self) -> int:
        """Bytes as stored."""
        return self.values.nbytes + self.scale.nbytes

    def scales(self) -> Tensor:
        """The blocks' scales: [R, C] float32."""
        return self.scale.to(torch.float32)

    def dequantized(self) -> Tensor:
        """Value x scale of its block: [out, in] float32, rounded once."""
        rows, columns = self.shape
        row_blocks = torch.arange(self.skipped_rows, self.skipped_rows + rows) // BLOCK_SIZE
        column_blocks = torch.arange(self.skipped_columns, self.skipped_columns + columns) // BLOCK_SIZE
        return self.values.to(torch.float32) * self.scales()[row_blocks][:, column_blocks]
