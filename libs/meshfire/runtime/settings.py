"""Settings that every service has. Only `config.py` files build on this; nothing else reads the environment."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

Port = Annotated[int, Field(ge=0, le=65535)]


def settings_config(prefix: str) -> SettingsConfigDict:
    """Configuration of a frozen settings class whose variables start with `prefix`."""
    return SettingsConfigDict(env_prefix=prefix, frozen=True, extra="forbid")


class ServiceSettings(BaseSettings):
    """What a process needs to be part of a mesh. Subclasses set the prefix and add their own fields."""

    #: Unique name in the mesh, as in status, logs and traces; empty = service name and process id.
    instance_id: str = ""
    #: Interface of the gRPC server.
    host: str = "127.0.0.1"
    #: Port of the gRPC server; 0 = a free one.
    port: Port = 0
    #: Host that peers are told to connect to; empty = `host`. For a server bound to 0.0.0.0, the container's own name.
    advertise_host: str = ""
    #: consul://HOST:PORT, static:/path/file.json or memory:
    registry_url: str = "consul://127.0.0.1:8500"
    #: OTLP/gRPC collector, http://HOST:PORT; empty = OTEL_EXPORTER_OTLP_ENDPOINT, else spans are dropped.
    otlp_endpoint: str = ""
    #: Port for Prometheus' GET /metrics; 0 = none.
    metrics_port: Port = 0
    #: Accept x-meshfire-script and x-meshfire-fault. Never in production.
    test_hooks: bool = False
    #: Time that running work has to end after SIGTERM.
    drain_s: float = Field(default=20.0, ge=0)
    #: Time between deregistration and the end of the server, for callers' discovery caches.
    discovery_lag_s: float = Field(default=0.2, ge=0)
    #: End when this process, which started this one, ends however it does (Linux); 0 = live on.
    parent_pid: int = Field(default=0, ge=0)
    #: Python's names.
    log_level: str = "INFO"
