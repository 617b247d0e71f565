"""Which door a gateway has, from its settings."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from meshfire.errors import BadInput
from meshfire.store.accounts import Accounts
from meshfire.store.database import Database
from meshfire.store.ledger import Ledger
from meshfire.store.request_windows import RequestWindows
from services.gateway.access.door import Door, OpenDoor
from services.gateway.access.keyed import KeyedDoor
from services.gateway.config import GatewaySettings


@asynccontextmanager
async def store_of(settings: GatewaySettings) -> AsyncIterator[Database | None]:
    """The store, if there is one. Raises BadInput, StoreUnavailable."""
    if not settings.store_url:
        yield None
        return
    database = await Database.open(settings.store_url)
    try:
        yield database
    finally:
        await database.close()


def door_for(settings: GatewaySettings, database: Database | None) -> Door:
    """Raises BadInput for an open door to the world or for keys without a store."""
    if not settings.keys:
        if not _is_loopback(settings.http_host):
            message = f"http_host is {settings.http_host}: without keys a gateway serves only loopback; set keys"
            raise BadInput(message, field="http_host")
        return OpenDoor()
    if database is None:
        raise BadInput("keys need a store: set store_url", field="store_url")
    return KeyedDoor(
        Accounts(database),
        RequestWindows(database),
        Ledger(database),
        requests_per_minute=settings.requests_per_minute,
        model_limits=settings.model_requests_per_minute,
        max_concurrent=settings.max_concurrent,
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
