"""Products and FFNs of which this process has a share of the output columns.

Owns where shares are gathered. Whatever path computes the shares, the gathered rows are those of the whole product.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meshfire.model.compute.interface import Linear
from meshfire.model.partition import Gather


@dataclass(frozen=True)
class GatheredLinear:
    """Rows come whole; every rank computes its columns and gets all of them."""

    share: Linear
    gather: Gather

    @property
    def num_bytes(self) -> int:
        """Memory of this rank's share."""
        return self.share.num_bytes

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, in] → [T, out]."""
        return self.gather(self.share(rows))


@dataclass(frozen=True)
class ScatteredLinear:
    """Rows come in shares, as a rank's heads or neurons leave them: they are gathered first."""

    share: Linear
    gather: Gather

    @property
    def num_bytes(self) -> int:
        """Memory of this rank's share."""
        return self.share.num_bytes

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, in / ranks] → [T, out]."""
        return self.gather(self.share(self.gather(rows)))


@dataclass(frozen=True)
class PartitionedFfn:
    """A SwiGLU cut by its neurons, then by its output columns."""

    inner: Linear
    outer: ScatteredLinear

    @property
    def num_bytes(self) -> int:
        """Memory of this rank's share."""
        return self.inner.num_bytes + self.outer.num_bytes

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, H] → [T, H]."""
        return self.outer(self.inner(rows))
