"""One channel per address, shared by all callers of a process."""

from __future__ import annotations

from typing import Any

import grpc

from meshfire.rpc.interceptors import StreamErrors, UnaryErrors
from meshfire.rpc.limits import CHANNEL_OPTIONS

# The stubs describe interceptors of synchronous channels only.
_INTERCEPTORS: Any = [UnaryErrors(), StreamErrors()]


class ChannelPool:
    """Caches channels by address. Belongs to one event loop; close it there."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `address` ("host:port"); connects on first use."""
        channel = self._channels.get(address)
        if channel is None:
            channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS, interceptors=_INTERCEPTORS)
            self._channels[address] = channel
        return channel

    async def drop(self, address: str) -> None:
        """Close the channel to an address that left the mesh."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close(None)

    async def close(self) -> None:
        """Close all channels."""
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close(None)
