"""The port through which every process finds its peers and shares small documents.

Owns the two value types, the contract, and the table from URL scheme to implementation. An implementation is one module
with `open_url(rest: str) -> Registry` and one line in `SCHEMES`; it is imported only when a URL asks for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Final, Protocol

from meshfire.errors import BadInput

SCHEMES: Final[Mapping[str, str]] = {
    "consul": "meshfire.discovery.consul",
    "static": "meshfire.discovery.static",
    "memory": "meshfire.discovery.memory",
}


@dataclass(frozen=True)
class Instance:
    """One running process of a service. `instance_id` is unique over all services of a mesh."""

    service: str
    instance_id: str
    address: str
    """host:port of its gRPC server."""
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class KvEntry:
    """A document and the version that a compare-and-set names; `index` is > 0 and grows with every write."""

    value: bytes
    index: int


class Registry(Protocol):
    """Discovery as the mesh uses it. Safe to use from one event loop; close it on that loop."""

    async def register(self, instance: Instance) -> None:
        """Announce a server that already answers. Idempotent per `instance_id` (the newest wins); health-checked where
        the implementation can. An agent that is away is no error: the instance is announced when it answers, and again
        whenever it forgot."""

    async def deregister(self, instance_id: str) -> None:
        """Withdraw it; unknown ids and an absent agent are no error."""

    def watch(self, service: str) -> AsyncIterator[tuple[Instance, ...]]:
        """The healthy instances, ordered by `instance_id`: once when first known, then on each change of content.

        Never raises because of an agent that is away: the last known good list stands until a new one is read."""

    async def kv_get(self, key: str) -> KvEntry | None:
        """The document, or None. Raises Unavailable if the agent cannot be reached."""

    async def kv_put(self, key: str, value: bytes, *, expected_index: int | None = None) -> bool:
        """Write; whether it was written. `expected_index`: None = unconditionally, 0 = only if absent, n = only if the
        stored index is n. Raises Unavailable if the agent cannot be reached."""

    def kv_watch(self, key: str) -> AsyncIterator[KvEntry | None]:
        """The document (None while absent): once when first known, then on each change. Rides out agent trouble as
        `watch` does."""

    async def close(self) -> None:
        """Stop loops and connections. Instances registered through this object are withdrawn as far as possible."""


def open_registry(url: str) -> Registry:
    """`consul://HOST:PORT`, `static:/path/topology.json` or `memory:` (a space of its own). Connects to nothing yet.

    Raises BadInput for another scheme or a malformed rest."""
    scheme, colon, rest = url.partition(":")
    if not colon or scheme not in SCHEMES:
        raise BadInput(f"registry {url!r} has no known scheme; use one of {', '.join(SCHEMES)}", field="registry_url")
    registry: Registry = import_module(SCHEMES[scheme]).open_url(rest)
    return registry
