"""What the ranks of one worker say to each other: gathers and broadcasts over gloo.

Owns the process group, as an object: no global one is set up. Loopback only, because ranks share one machine's KV
memory. A peer that is gone or silent for longer than the timeout is RankLost, and then the group is useless.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshfire.errors import RankLost

LOOPBACK = "127.0.0.1"


class RankGroup:
    """Rank `rank` of `size`; rank 0 leads. Calls must come in the same order on every rank, from one thread."""

    def __init__(self, store: dist.Store, rank: int, size: int, *, timeout_s: float) -> None:
        """Meets the other ranks at `store`. Raises RankLost if they do not come in time."""
        self.rank, self.size = rank, size
        options = _gloo()._Options()
        options._devices = [_gloo().create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=timeout_s)
        self._group = _checked(lambda: _gloo()(store, rank, size, options))

    def gather(self, rows: Tensor) -> Tensor:
        """[T, n] of each rank → [T, n x size], rank after rank, on every rank. Raises RankLost."""
        mine = rows.contiguous()
        shares = [torch.empty_like(mine) for _ in range(self.size)]
        _checked(lambda: self._group.allgather([shares], [mine]).wait())
        return torch.cat(shares, dim=-1)

    def broadcast(self, values: Tensor) -> Tensor:
        """Rank 0's `values` on every rank, in place; contiguous. Raises RankLost."""
        _checked(lambda: self._group.broadcast([values], dist.BroadcastOptions()).wait())
        return values


def _gloo() -> Any:
    # In torch's stubs its options are missing.
    return vars(dist)["ProcessGroupGloo"]


def _checked(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:  # all that gloo raises
        raise RankLost(f"a rank of this worker is gone or silent: {str(error).splitlines()[0][:200]}") from error
