"""Settings of a process that holds a model: prefill and decode workers build on them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from meshfire.model.compute.names import ComputeName
from meshfire.model.interface import KvGeometry
from meshfire.runtime.settings import ServiceSettings
from meshfire.worker.hop_link import HopTransport


class ModelWorkerSettings(ServiceSettings):
    """Which model, where its experts are, and how much memory for its KV."""

    #: Name under which the model is served.
    model: str = Field(min_length=1)
    #: Hugging Face directory of the model.
    model_dir: Path
    #: Slices into which dense FFNs are cut for the expert shards; 0 = they stay here. Same in the whole mesh.
    dense_slices: int = Field(default=0, ge=0)
    #: Where experts are computed: in this process, or on the mesh's expert shards.
    experts: Literal["local", "mesh"] = "mesh"
    #: How hops reach shards: auto = over a local socket where the shard is on this machine, else gRPC; grpc = never
    #: over a local socket; local = a shard that cannot be reached over one is not used (ADR 11).
    hop_transport: HopTransport = "auto"
    #: Rows from which a step is cut in two, so that one half's attention runs under the other's experts; 0 = never.
    #: A worker of several ranks never cuts.
    overlap_from: int = Field(default=384, ge=0)
    #: Tokens in one KV block. Same in the whole mesh.
    block_tokens: int = Field(default=16, ge=1, le=1024)
    #: KV blocks; 0 = as many as fit kv_cache_bytes.
    num_kv_blocks: int = Field(default=0, ge=0)
    #: Memory for KV, taken as it is used.
    kv_cache_bytes: int = Field(default=512 * 1024 * 1024, ge=1)
    #: How matrix products are computed; auto = at the checkpoint's precision. Same in the whole mesh.
    compute: ComputeName = "auto"
    #: Ranks that share the model's heads, neurons and output columns, one process each; 1 = this process alone.
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    #: Longest silence of a rank before this worker gives up and starts anew.
    rank_timeout_s: float = Field(default=30.0, gt=0)
    #: Threads of one matrix product.
    num_threads: int = Field(default=1, ge=1)

    def blocks_of(self, geometry: KvGeometry) -> int:
        """KV blocks of this worker; at least one."""
        return self.num_kv_blocks or max(1, self.kv_cache_bytes // geometry.block_bytes)
