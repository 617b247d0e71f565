"""A dry run of a model: how large it is, what each process would hold, and what fits into given memory.

Owns the sums; no weight is read. Sizes are those of the checkpoint's own form: a compute path that widens weights needs
more. KV is counted at two bytes a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshfire.errors import BadInput
from meshfire.model import registry
from meshfire.model.config import Fields, read_json
from meshfire.modelstore import inventory
from meshfire.modelstore.inventory import Entry

KV_NUMBER_BYTES = 2


@dataclass(frozen=True)
class Fit:
    """What one process of `memory_bytes` can be. `kv_tokens`: of a worker, 0 if its weights do not fit."""

    memory_bytes: int
    worker_fits: bool
    kv_tokens: int
    shard_fits: bool
    max_experts: int
    min_shards: int


@dataclass(frozen=True)
class Inspection:
    """The answer of `inspect`. A worker holds all but routed experts, vision tower and projector."""

    architecture: str
    #: "headers" or "config.json"
    source: str
    num_tensors: int
    num_bytes: int
    num_parameters: int
    text_parameters: int
    vision_parameters: int
    projector_parameters: int
    #: that one token passes through: chosen experts only, without the row look-up in the embedding
    active_parameters: int
    bytes_by_dtype: dict[str, int]
    num_experts: int
    expert_bytes: int
    worker_bytes: int
    num_shards: int
    #: of the largest of `num_shards` shards
    shard_bytes: int
    context_tokens: int
    kv_token_bytes: int
    kv_context_bytes: int
    fits: tuple[Fit, ...]


def inspect(directory: Path, *, num_shards: int = 1, memory_bytes: Sequence[int] = ()) -> Inspection:
    """From config.json, and from the files' headers if there are files. Raises CheckpointError, BadInput."""
    if num_shards < 1:
        raise BadInput(f"shards is {num_shards}, expected at least 1", field="shards")
    config = read_json(directory, "config.json")
    size = registry.size_of(directory)
    files = any(directory.glob("*.safetensors"))
    entries = inventory.from_files(directory) if files else inventory.from_config(config.values)
    parameters, held = _sums(entries)
    pairs = sum(size.num_experts)
    expert_bytes = -(-held["expert"] // pairs) if pairs else 0
    worker_bytes = held["other"] + held["embedding"]
    shard_experts = -(-pairs // num_shards)
    text = sum(parameters[role] for role in ("expert", "embedding", "other"))
    kv_token_bytes = len(size.num_experts) * size.kv_row_width * KV_NUMBER_BYTES
    per_expert = parameters["expert"] // pairs if pairs else 0
    chosen = sum(min(count, _top_k(config)) for count in size.num_experts)
    tied = (config.section("text_config") or config).flag("tie_word_embeddings", False)
    return Inspection(
        architecture=config.text("model_type"),
        source="headers" if files else "config.json",
        num_tensors=len(entries),
        num_bytes=sum(entry.num_bytes for entry in entries),
        num_parameters=sum(parameters.values()),
        text_parameters=text,
        vision_parameters=parameters["vision"],
        projector_parameters=parameters["projector"],
        active_parameters=parameters["other"] + chosen * per_expert + (parameters["embedding"] if tied else 0),
        bytes_by_dtype=_by_dtype(entries),
        num_experts=pairs,
        expert_bytes=expert_bytes,
        worker_bytes=worker_bytes,
        num_shards=num_shards,
        shard_bytes=shard_experts * expert_bytes,
        context_tokens=size.context_tokens,
        kv_token_bytes=kv_token_bytes,
        kv_context_bytes=kv_token_bytes * size.context_tokens,
        fits=tuple(_fit(one, worker_bytes, kv_token_bytes, expert_bytes, pairs, shard_experts) for one in memory_bytes),
    )


def _fit(memory: int, worker_bytes: int, kv_bytes: int, expert_bytes: int, pairs: int, shard_experts: int) -> Fit:
    max_experts = min(pairs, memory // expert_bytes) if expert_bytes else 0
    return Fit(
        memory_bytes=memory,
        worker_fits=worker_bytes < memory,
        kv_tokens=max(0, memory - worker_bytes) // kv_bytes,
        shard_fits=shard_experts <= max_experts,
        max_experts=max_experts,
        min_shards=-(-pairs // max_experts) if max_experts else 0,
    )


def _sums(entries: Sequence[Entry]) -> tuple[Counter[str], Counter[str]]:
    """Parameters and bytes by role."""
    parameters: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for entry in entries:
        parameters[entry.role] += entry.num_parameters
        held[entry.role] += entry.num_bytes
    return parameters, held


def _by_dtype(entries: Sequence[Entry]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for entry in entries:
        found[entry.dtype] += entry.num_bytes
    return dict(found.most_common())


def _top_k(config: Fields) -> int:
    return (config.section("text_config") or config).integer("num_experts_per_tok", 0)
