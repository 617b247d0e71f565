"""Settings of a decode worker (environment prefix MESHFIRE_DECODE_)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshfire.runtime.settings import settings_config
from meshfire.worker.settings import ModelWorkerSettings


class DecodeSettings(ModelWorkerSettings):
    """How many sequences at once, and how long others are waited for."""

    model_config = settings_config("MESHFIRE_DECODE_")

    #: Sequences that read KV or run at once.
    max_batch: int = Field(default=16, ge=1)
    #: Leases taken beyond max_batch, so that a finished sequence is replaced without a round trip.
    max_waiting: int = Field(default=2, ge=0)
    #: Tokens per step of prompts that are computed here, while other sequences are in the middle of their output.
    chunk_tokens: int = Field(default=32, ge=1)
    #: The same while none is.
    idle_chunk_tokens: int = Field(default=256, ge=1)
    #: Who guesses tokens ahead, so that one step can choose several: the outputs are the same.
    speculation: Literal["off", "prompt-lookup"] = "off"
    #: Tokens guessed ahead at most.
    max_draft_tokens: int = Field(default=4, ge=1, le=32)
    #: Longest silence of a prefill worker while its KV is read.
    read_timeout_s: float = Field(default=15.0, gt=0)
    #: Longest wait for experts in one try of a step; a step that fails in a retryable way is tried again.
    step_timeout_s: float = Field(default=10.0, gt=0)
