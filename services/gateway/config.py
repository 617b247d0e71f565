"""Settings of a gateway (environment prefix MESHFIRE_GATEWAY_)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from meshfire.runtime.settings import Port, ServiceSettings, settings_config


class GatewaySettings(ServiceSettings):
    """Where HTTP is served and what one request may take."""

    model_config = settings_config("MESHFIRE_GATEWAY_")

    #: Interface of the HTTP server.
    http_host: str = "127.0.0.1"
    #: Port of the HTTP server; 0 = a free one.
    http_port: Port = 8000
    #: Largest request body; beyond it 413.
    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1)
    #: Time of one request from its body's first byte to its answer's last; the deadline of its gRPC calls.
    request_timeout_s: float = Field(default=600.0, gt=0)
    #: Outputs of one request at most: prompts x n (or best_of).
    max_outputs: int = Field(default=128, ge=1)
    #: How long /healthz and /v1/models wait for a router.
    probe_timeout_s: float = Field(default=2.0, gt=0)
    #: Ask for API tokens; without them the gateway serves loopback only.
    keys: bool = False
    #: Where accounts and keys are, sqlite:///PATH or postgresql://…
    store_url: str = ""
    #: Requests of an account in one minute, for all models that have no limit of their own.
    requests_per_minute: int = Field(default=300, ge=0)
    #: Requests of an account in one minute for single models.
    model_requests_per_minute: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    #: Requests of an account under way at once, in this gateway.
    max_concurrent: int = Field(default=64, ge=0)
    #: Uploaded files are kept so long.
    file_retention_s: float = Field(default=7 * 86_400.0, gt=0)
    #: One call of the job service.
    job_timeout_s: float = Field(default=60.0, gt=0)
    #: Names of models that callers use → names that are served.
    model_aliases: dict[str, str] = Field(default_factory=dict)
    #: classic or chat, for models whose names do not tell how Workers AI's path speaks to them.
    model_families: dict[str, Literal["classic", "chat"]] = Field(default_factory=dict)
