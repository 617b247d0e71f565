"""Partial sums of several shards as one result.

Owns the addition: integers first, one rounding at the end, so that the total does not depend on which shard computed
which expert or in which order the answers came. A row has at most `fixed_point.MAX_TERMS` contributions over all shards
(every shard checks K) and each is below `fixed_point.FIXED_LIMIT`, so no sum leaves 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshfire.model.fixed_point import from_fixed


@dataclass(frozen=True, slots=True)
class Partial:
    """One shard's weighted sum over its experts."""

    #: [n] int64 distinct rows of the step; None = all of them
    rows: Tensor | None
    #: [n, H] int64 fixed point
    values: Tensor


def combine(partials: Sequence[Partial], num_tokens: int, hidden_size: int) -> Tensor:
    """The sum of all partials, [T, H] float32; rows that no partial has are zero."""
    whole = [partial.values for partial in partials if partial.rows is None]
    parts = [partial for partial in partials if partial.rows is not None]
    total = whole[0] if whole else torch.zeros(num_tokens, hidden_size, dtype=torch.int64)
    for values in whole[1:]:
        total = total + values
    if parts and whole:
        total = total.clone()
    for partial in parts:
        assert partial.rows is not None
        total.index_add_(0, partial.rows, partial.values)
    return from_fixed(total)
