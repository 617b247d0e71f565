"""Settings of the router (environment prefix MESHFIRE_ROUTER_)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from meshfire.runtime.settings import ServiceSettings, settings_config


class RouterSettings(ServiceSettings):
    """How long requests may take and wait, and how many may wait."""

    model_config = settings_config("MESHFIRE_ROUTER_")

    #: Time a request has when its caller sets no deadline, and at most.
    default_deadline_s: float = Field(default=120.0, gt=0)
    #: Kept of a caller's deadline to still tell it why the request failed; at most a tenth of the deadline.
    deadline_margin_s: float = Field(default=0.25, ge=0)
    #: Requests of one model that wait for a prefill worker; the next one is refused.
    max_queued_requests: int = Field(default=256, ge=0)
    #: Prompt tokens of those requests together.
    max_queued_prompt_tokens: int = Field(default=2_000_000, ge=1)
    #: Asynchronous work that has waited for so long counts as online.
    ageing_s: float = Field(default=600.0, ge=0)
    #: A prompt of which a decode worker lacks at most so many tokens is computed there; 0 = always by prefill workers.
    local_prefill_max_tokens: int = Field(default=0, ge=0)
    #: Models that have no prefill workers: decode workers compute all of their prompts.
    models_without_prefill: frozenset[str] = frozenset()
    #: Wait for workers of a model that was served before and has none now.
    worker_wait_s: float = Field(default=10.0, ge=0)
    #: An offered KV is granted until this long before its owner would free it.
    offer_margin_s: float = Field(default=1.0, ge=0)
    #: Life of an offered KV whose owner names none.
    offer_timeout_s: float = Field(default=30.0, gt=0)
    #: Longest pause before the work of a failed lease is leased anew.
    retry_pause_max_s: float = Field(default=2.0, gt=0)
    #: Answer of a tokenizer that is awaited before another one is asked.
    tokenizer_timeout_s: float = Field(default=10.0, gt=0)
    #: sqlite:///PATH or postgresql://… for the ledger and for jobs; empty = nothing is recorded, no job is taken.
    store_url: str = ""
    #: YAML file with prices of own models.
    prices: Path | None = None
    #: Results of jobs, and files, are kept so long after a job's end or a file's upload.
    job_retention_s: float = Field(default=7 * 86_400.0, gt=0)
    #: Time that a job has, unless its submitter says otherwise.
    job_window_s: float = Field(default=86_400.0, gt=0)
    #: A holder of items says that it lives …
    job_beat_s: float = Field(default=5.0, gt=0)
    #: … and is taken for dead after so long without it.
    job_silent_s: float = Field(default=30.0, gt=0)
    #: Time of one attempt at an item.
    job_attempt_s: float = Field(default=3600.0, gt=0)
    #: Where events of jobs are posted; empty = nowhere.
    webhook_url: str = ""
    #: Signs them: whsec_ and base64 of at least 16 bytes.
    webhook_secret: str = Field(default="", repr=False)
