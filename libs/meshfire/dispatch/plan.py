"""Which rows of a step go to which shard.

Owns the choice among an expert's replicas and the cut of a [T, K] choice into one part per shard. Does not know how a
part travels or whether it arrives: the caller plans again, with other live shards, what was lost.

Works on numpy views: a decode step has a few dozen ids, where an operator of torch costs ten times the work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshfire.errors import UnknownExpert
from meshfire.placement.shard_map import Replicas, ShardMap

_NOBODY = -1


@dataclass(frozen=True, slots=True)
class ShardPart:
    """What one shard computes: rows with at least one of its experts, and nothing else travels."""

    shard_id: str
    #: [n] int64 rows of the step, ascending; None = all of them
    rows: Tensor | None
    #: [n, K] int32; -1 where the expert is another shard's
    topk_ids: Tensor


class ShardPlanner:
    """Plans against one placement. Reads only values fixed at construction, so any thread may call it."""

    def __init__(self, shard_map: ShardMap) -> None:
        self.shard_map = shard_map
        self._shard_ids = shard_map.shard_ids
        self._index = {shard_id: index for index, shard_id in enumerate(self._shard_ids)}
        self._layers = [_Layer(experts, self._index) for experts in shard_map.layers]

    def plan(self, topk_ids: Tensor, layer: int, load: Mapping[str, int]) -> tuple[ShardPart, ...]:
        """Cut `topk_ids` [T, K] int32 (-1 = no expert) into one part per shard.

        `load` has the rows under way of every live shard. An expert goes to its least loaded live replica, the most
        wanted experts first; without a live one to its first replica, which may come back. Raises UnknownExpert.
        """
        ids = topk_ids.numpy()
        if ids.size == 0:
            return ()
        placed = self._layer(layer)
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < -1 or highest >= len(placed.replicas):
            raise UnknownExpert(f"layer {layer} has {len(placed.replicas)} experts, got ids {lowest} to {highest}")
        owner_of = self._owners(placed, ids, load)[ids]  # [T, K]; id -1 reads the last entry: nobody
        present = sorted(set(owner_of.ravel().tolist()))
        if len(present) == 1 and present[0] != _NOBODY:
            return (ShardPart(self._shard_ids[present[0]], None, topk_ids),)
        return tuple(_part(self._shard_ids[one], ids, owner_of == one) for one in present if one != _NOBODY)

    def _layer(self, layer: int) -> _Layer:
        if not 0 <= layer < len(self._layers):
            raise UnknownExpert(f"the placement has {len(self._layers)} layers, got layer {layer}")
        return self._layers[layer]

    def _owners(self, layer: _Layer, ids: NDArray[np.int32], load: Mapping[str, int]) -> NDArray[np.int64]:
        """Shard index of each expert, and nobody at the end: [E + 1]."""
        if not layer.has_choice:
            return layer.first_owner
        owners = layer.first_owner.copy()
        rows = dict(load)
        wanted = Counter(ids.ravel().tolist())
        for expert, count in sorted(wanted.items(), key=lambda item: (-item[1], item[0])):
            if expert >= 0:
                live = [shard_id for shard_id in layer.replicas[expert] if shard_id in load]
                shard_id = min(live, key=lambda one: (rows[one], one)) if live else layer.replicas[expert][0]
                rows[shard_id] = rows.get(shard_id, 0) + count
                owners[expert] = self._index[shard_id]
        return owners


class _Layer:
    """One layer's replicas, and the answer that holds as long as no expert has a choice."""

    def __init__(self, replicas: tuple[Replicas, ...], index: Mapping[str, int]) -> None:
        self.replicas = replicas
        self.has_choice = any(len(one) > 1 for one in replicas)
        self.first_owner = np.array([index[one[0]] for one in replicas] + [_NOBODY], dtype=np.int64)


def _part(shard_id: str, ids: NDArray[np.int32], mine: NDArray[np.bool_]) -> ShardPart:
    mine_only = np.where(mine, ids, np.int32(-1))
    kept = mine.any(axis=1)
    if kept.all():
        return ShardPart(shard_id, None, torch.from_numpy(mine_only))
    rows = np.flatnonzero(kept)
    return ShardPart(shard_id, torch.from_numpy(rows), torch.from_numpy(mine_only[rows]))
