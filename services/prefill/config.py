"""Settings of a prefill worker (environment prefix MESHFIRE_PREFILL_)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from meshfire.model.interface import KvGeometry
from meshfire.runtime.settings import ServiceSettings, settings_config


class PrefillSettings(ServiceSettings):
    """Which model, how much memory for its KV, and how much work at once."""

    model_config = settings_config("MESHFIRE_PREFILL_")

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
    #: Prompt tokens of one step.
    chunk_tokens: int = Field(default=512, ge=1)
    #: Prompts under way at once; their chunks take turns.
    max_leases: int = Field(default=4, ge=1)
    #: Life of an offered KV that nobody is granted.
    offer_ttl_s: float = Field(default=30.0, gt=0)
    #: Life of a granted KV that nobody reads.
    grant_ttl_s: float = Field(default=30.0, gt=0)
    #: Longest time from the start of a read to its acknowledgement.
    read_ttl_s: float = Field(default=60.0, gt=0)
    #: How long a reader that came before its grant is kept waiting.
    grant_wait_s: float = Field(default=1.0, ge=0)
    #: Threads of one matrix product.
    num_threads: int = Field(default=1, ge=1)

    def blocks_of(self, geometry: KvGeometry) -> int:
        """KV blocks of this worker; at least one."""
        return self.num_kv_blocks or max(1, self.kv_cache_bytes // geometry.block_bytes)
