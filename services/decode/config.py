"""Settings of a decode worker (environment prefix MESHFIRE_DECODE_)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from meshfire.model.interface import KvGeometry
from meshfire.runtime.settings import ServiceSettings, settings_config


class DecodeSettings(ServiceSettings):
    """Which model, how much memory for its KV, and how many sequences at once."""

    model_config = settings_config("MESHFIRE_DECODE_")

    #: Name under which the model is served.
    model: str = Field(min_length=1)
    #: Hugging Face directory of the model.
    model_dir: Path
    #: Slices into which dense FFNs are cut for the expert shards; 0 = they stay here. Same in the whole mesh.
    dense_slices: int = Field(default=0, ge=0)
    #: Where experts are computed: in this process, or on the mesh's expert shards.
    experts: Literal["local", "mesh"] = "mesh"
    #: Tokens in one KV block. Same in the whole mesh.
    block_tokens: int = Field(default=16, ge=1, le=1024)
    #: KV blocks; 0 = as many as fit kv_cache_bytes.
    num_kv_blocks: int = Field(default=0, ge=0)
    #: Memory for KV, taken as it is used.
    kv_cache_bytes: int = Field(default=512 * 1024 * 1024, ge=1)
    #: Sequences that read KV or run at once.
    max_batch: int = Field(default=16, ge=1)
    #: Leases taken beyond max_batch, so that a finished sequence is replaced without a round trip.
    max_waiting: int = Field(default=2, ge=0)
    #: Longest silence of a prefill worker while its KV is read.
    read_timeout_s: float = Field(default=15.0, gt=0)
    #: Longest wait for experts in one try of a step; a step that fails in a retryable way is tried again.
    step_timeout_s: float = Field(default=10.0, gt=0)
    #: Threads of one matrix product.
    num_threads: int = Field(default=1, ge=1)

    def blocks_of(self, geometry: KvGeometry) -> int:
        """KV blocks of this worker; at least one."""
        return self.num_kv_blocks or max(1, self.kv_cache_bytes // geometry.block_bytes)
