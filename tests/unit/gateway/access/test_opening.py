"""Which door a gateway opens, and which it refuses to."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfire.errors import BadInput
from services.gateway.access.door import OpenDoor
from services.gateway.access.keyed import KeyedDoor
from services.gateway.access.opening import door_for, store_of
from services.gateway.config import GatewaySettings


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
async def test_loopback_may_be_open(host: str) -> None:
    assert isinstance(door_for(GatewaySettings(http_host=host), None), OpenDoor)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
async def test_the_world_needs_keys(host: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        door_for(GatewaySettings(http_host=host), None)
    assert caught.value.field == "http_host"
    settings = GatewaySettings(http_host=host, keys=True, store_url=f"sqlite:///{tmp_path / 'store.db'}")
    async with store_of(settings) as database:
        assert isinstance(door_for(settings, database), KeyedDoor)


async def test_keys_need_a_store() -> None:
    with pytest.raises(BadInput) as caught:
        async with store_of(settings := GatewaySettings(keys=True)) as database:
            door_for(settings, database)
    assert caught.value.field == "store_url"
