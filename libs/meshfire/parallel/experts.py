"""Routed experts for all ranks: rank 0 asks the mesh, the others get what came back.

Owns how a failure of the experts reaches every rank at the same point of the step, so that all of them give it up
together. Knows nothing of shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshfire.errors import MeshfireError, Unavailable
from meshfire.model.interface import ExpertBackend, PendingExperts
from meshfire.parallel.group import RankGroup

_DONE, _FAILED = 0, 1


@dataclass(frozen=True)
class LeaderExperts:
    """Rank 0's backend around the real one."""

    backend: ExpertBackend
    group: RankGroup

    def dispatch(self, layer: int, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> PendingExperts:
        """As ExpertBackend; an error comes out of `result`, where the other ranks wait."""
        try:
            return _LeaderPending(self.backend.dispatch(layer, hidden, topk_ids, topk_weights), None, self.group)
        except MeshfireError as error:
            return _LeaderPending(None, error, self.group)


@dataclass(frozen=True)
class _LeaderPending:
    pending: PendingExperts | None
    error: MeshfireError | None
    group: RankGroup

    def result(self) -> Tensor:
        try:
            if self.pending is None:
                assert self.error is not None
                raise self.error
            output = self.pending.result()
        except BaseException:
            self.group.broadcast(torch.tensor([_FAILED]))
            raise
        self.group.broadcast(torch.tensor([_DONE]))
        return self.group.broadcast(output.contiguous())


@dataclass(frozen=True)
class FollowerExperts:
    """Every other rank's backend."""

    group: RankGroup

    def dispatch(self, layer: int, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> PendingExperts:
        """As ExpertBackend; asks nobody."""
        return _FollowerPending(torch.empty_like(hidden), self.group)


@dataclass(frozen=True)
class _FollowerPending:
    output: Tensor
    group: RankGroup

    def result(self) -> Tensor:
        if int(self.group.broadcast(torch.empty(1, dtype=torch.int64))) == _FAILED:
            raise Unavailable("rank 0 gave up this step")
        return self.group.broadcast(self.output)
