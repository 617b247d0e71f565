"""Four-bit weights as compressed-tensors packs them (`pack-quantized`): what Kimi K2.5's routed experts are.

Owns the packing: eight values to a word along the inputs, lowest nibble first, stored as q + 8; one scale for each
group of 32 inputs, no zero point. Nothing is unpacked before it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VALUES_PER_WORD = 8
GROUP_SIZE = 32
_ZERO = 8  # a stored nibble is q + 8
_NIBBLE = 15
_BITS = 4


@dataclass(frozen=True)
class Int4Weight:
    """A matrix [out, in], or a cut of one: `packed` [out, 4 G] int32 and `scale` [out, G] cover its G groups.

    The first group begins `skipped` inputs before the matrix (0 unless columns were cut inside a group).
    """

    packed: Tensor
    scale: Tensor
    num_columns: int
    skipped: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.packed.shape[0], self.num_columns

    @property
    def num_bytes(self) -> int:
        """Bytes as stored."""
        return self.packed.nbytes + self.scale.nbytes

    def integers(self) -> Tensor:
        """q of every group covered: [out, 32 G] int8 in [-8, 7]; columns from `skipped` on are the matrix's."""
        pairs = self.packed.contiguous().view(torch.uint8)  # little-endian: two values a byte, in order
        nibbles = torch.stack((pairs & _NIBBLE, pairs >> _BITS), dim=-1).flatten(1)
        return nibbles.view(torch.int8) - _ZERO

    def scales(self) -> Tensor:
        """The groups' scales: [out, G] float32."""
        return self.scale.to(torch.float32)

    def dequantized(self) -> Tensor:
        """q x scale: [out, in] float32. Exact where scales are bfloat16 or float16: 4 bits times at most 11."""
        groups = self.integers().view(*self.scale.shape, GROUP_SIZE)
        values = (groups * self.scales()[:, :, None]).flatten(1)
        return values[:, self.skipped : self.skipped + self.num_columns]
