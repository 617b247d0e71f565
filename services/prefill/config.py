"""Settings of a prefill worker (environment prefix MESHFIRE_PREFILL_)."""

from __future__ import annotations

from pydantic import Field

from meshfire.runtime.settings import settings_config
from meshfire.worker.settings import ModelWorkerSettings


class PrefillSettings(ModelWorkerSettings):
    """How much work at once, and how long computed KV waits for its reader."""

    model_config = settings_config("MESHFIRE_PREFILL_")

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
