"""A rank's share of a decoder: which heads, neurons and output columns it has, and how the shares come together.

Owns the cut of tensor parallelism. Every product is cut by its output columns and put together by gathering, never by
summing partial products: a column is then summed over the same inputs in the same order whatever the number of ranks,
so the logits are the same bits on one rank as on eight. The price is two small gathers where Megatron's cut has one
sum. Knows no processes and no transport: how rows are gathered is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from meshfire.errors import CheckpointError

Gather = Callable[[Tensor], Tensor]


def _alone(rows: Tensor) -> Tensor:
    return rows


@dataclass(frozen=True)
class Partition:
    """Rank `rank` of `size`. `gather`: [T, n] of each rank → [T, n x size], rank after rank, on every rank."""

    rank: int = 0
    size: int = 1
    gather: Gather = _alone

    def share(self, count: int, field: str) -> slice:
        """This rank's part of `count` things. Raises CheckpointError naming `field` if they do not divide evenly."""
        if count % self.size:
            raise CheckpointError(f"{field} is {count}, expected a multiple of {self.size} ranks", field=field)
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


WHOLE = Partition()


@dataclass(frozen=True)
class KvColumns:
    """How a token's KV row is divided: `num_sections` equal parts, each cut over the ranks by heads.

    Grouped-query attention has two (keys, values); 0 = the row belongs to every rank as it is (MLA's latent).
    """

    row_width: int
    num_sections: int

    def rank_width(self, size: int) -> int:
        """Numbers per token that one rank of `size` reads and writes."""
        return self.row_width // size if self.num_sections else self.row_width
