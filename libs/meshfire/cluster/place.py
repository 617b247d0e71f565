"""Writes the first placement document of each model that has expert shards."""

from __future__ import annotations

from collections.abc import Sequence

from meshfire.cluster.plan import ResolvedModel, shard_ids
from meshfire.cluster.topology import Topology
from meshfire.discovery.base import Registry
from meshfire.model import registry as models
from meshfire.placement import shard_map


async def place(topology: Topology, resolved: Sequence[ResolvedModel], registry: Registry) -> None:
    """Spread each model's experts over its shards, at the next epoch. Raises Unavailable if the agent is away."""
    for index, model in enumerate(resolved):
        if not model.expert_shards:
            continue
        facts = models.describe(model.directory, dense_slices=model.dense_slices, compute=model.topology.compute)
        key = shard_map.placement_key(model.topology.served_name)
        entry = await registry.kv_get(key)
        epoch = shard_map.ShardMap.from_json(entry.value).epoch + 1 if entry else 1
        document = shard_map.spread(
            facts.experts,
            shard_ids(topology, resolved, index),
            epoch=epoch,
            model=model.topology.served_name,
            revision=facts.revision,
        )
        await registry.kv_put(key, document.to_json())
