"""Writing to a bidirectional stream whose other side may have ended it.

grpc.aio reports a write to a call that has ended in two ways, by the moment: as the call's own error, or as an
asyncio.InvalidStateError that says nothing of the cause. Here both are the same error.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from meshfire.errors import Unavailable
from meshfire.rpc.status import from_rpc_error


async def write(call: Any, message: Any) -> None:
    """Send one message. Raises what the other side said when it ended the call, or Unavailable."""
    try:
        await call.write(message)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    except asyncio.InvalidStateError:
        raise Unavailable("the other side ended the stream") from None


async def done_writing(call: Any) -> None:
    """End this side of the stream; no error if the call has ended."""
    try:
        await call.done_writing()
    except asyncio.InvalidStateError:
        return
