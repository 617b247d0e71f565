"""Numbers as integers in units of 2^-40: sums that come out the same in any order and any grouping.

Owns the unit and its limits (design §5: expert outputs are combined exactly). A contribution may be at most
`FIXED_LIMIT`, and at most `MAX_TERMS` of them are added, so no sum of legal contributions can overflow 64 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshfire.errors import NonFiniteValue

FIXED_BITS = 40
FIXED_UNIT = 2.0**-FIXED_BITS
MAX_TERMS = 64
#: exclusive bound of one contribution's magnitude: 64 · 2^17 · 2^40 = 2^63
FIXED_LIMIT = 2.0**17


def to_fixed(values: Tensor, *, field: str = "output") -> Tensor:
    """Round floating-point `values` to int64 multiples of the unit (ties to even).

    Raises NonFiniteValue, naming `field`, for NaN, infinity and magnitudes of `FIXED_LIMIT` or more.
    """
    wide = values.to(torch.float64)
    if wide.numel() and not bool((wide.abs() < FIXED_LIMIT).all()):
        raise NonFiniteValue(f"{field} holds NaN, infinity or a magnitude of {FIXED_LIMIT:g} or more", field=field)
    return torch.round(wide * 2.0**FIXED_BITS).to(torch.int64)


def from_fixed(sums: Tensor) -> Tensor:
    """int64 multiples of the unit → float32."""
    return sums.to(torch.float64).mul_(FIXED_UNIT).to(torch.float32)
