"""Looks up what a topology leaves open: model directories, and how many shards and slices each model gets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshfire.cluster.plan import ResolvedModel
from meshfire.cluster.topology import ModelTopology, Topology
from meshfire.errors import BadInput
from meshfire.model import registry as models


def resolve(topology: Topology, find_model: Callable[[str], Path]) -> list[ResolvedModel]:
    """`find_model` turns a name or directory into a model directory. Raises UnknownModel, CheckpointError, BadInput."""
    return [_resolve(one, find_model(one.model)) for one in topology.models]


def _resolve(model: ModelTopology, directory: Path) -> ResolvedModel:
    is_moe = any(models.describe(directory).experts.num_experts)
    shards = model.expert_shards if model.expert_shards is not None else (2 if is_moe else 0)
    slices = model.dense_slices if model.dense_slices is not None else (0 if is_moe else shards)
    if slices and not shards:
        raise BadInput(f"{model.served_name}: dense_slices={slices} needs expert_shards", field="models.dense_slices")
    if shards and not is_moe and not slices:
        raise BadInput(
            f"{model.served_name} has no experts: its shards need dense_slices > 0", field="models.dense_slices"
        )
    return ResolvedModel(model, directory, shards, slices)
