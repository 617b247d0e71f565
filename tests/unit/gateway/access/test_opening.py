"""Which door a gateway opens, and which it refuses to."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfire.errors import BadInput
from services.gateway.access.door import OpenDoor
from services.gateway.access.keyed import KeyedDoor
from services.gateway.access.opening import door_for
from services.gateway.config import GatewaySettings


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
async def test_loopback_may_be_open(host: str) -> None:
    async with door_for(GatewaySettings(http_host=host)) as door:
        assert isinstance(door, OpenDoor)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
async def test_the_world_needs_keys(host: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        async with door_for(GatewaySettings(http_host=host)):
            pass
    assert caught.value.field == "http_host"
    settings = GatewaySettings(http_host=host, keys=True, store_url=f"sqlite:///{tmp_path / 'store.db'}")
    async with door_for(settings) as door:
        assert isinstance(door, KeyedDoor)


async def test_keys_need_a_store() -> None:
    with pytest.raises(BadInput) as caught:
        async with door_for(GatewaySettings(keys=True)):
            pass
    assert caught.value.field == "store_url"
