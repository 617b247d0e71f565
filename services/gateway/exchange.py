"""One HTTP exchange on the ASGI level: the body with its limits, the client that may leave, the headers passed on.

Owns reading; knows no dialect, no endpoint and no gRPC.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import Receive

from meshfire.rpc.limits import MAX_METADATA_BYTES
from services.gateway.errors import ClientGone, HttpError
from services.gateway.groups import first_cause

#: Test hooks, passed to the router as they are; it decides whether they are allowed.
HOOK_HEADERS = ("x-meshfire-script", "x-meshfire-fault")
AFFINITY_HEADER = "x-session-affinity"
TRACEPARENT_HEADER = "traceparent"
MAX_AFFINITY_CHARS = 1024
#: What gRPC metadata holds (meshfire.rpc.limits), less room for the call's other headers.
MAX_HOOK_CHARS = MAX_METADATA_BYTES - 16 * 1024

#: Bytes of an over-long body that are read and dropped, so that a client that writes before it reads sees its 413
#: instead of a reset connection.
MAX_DRAINED_BYTES = 64 * 1024 * 1024
#: Bodies beyond this are parsed off the event loop.
LOOP_PARSE_BYTES = 256 * 1024

_JSON_TYPE = re.compile(r"^application/(json|[a-z0-9.+-]+\+json)\s*(;|$)", re.IGNORECASE)
_GRPC_TEXT = re.compile(r"^[ -~]*$")


async def read_json(headers: Headers, receive: Receive, *, max_bytes: int, timeout_s: float) -> object:
    """The body as JSON values. Raises HttpError: 400 broken, 408 too slow, 413 too large, 415 not JSON."""
    content_type = headers.get("content-type")
    if content_type is not None and not _JSON_TYPE.match(content_type):
        raise HttpError(415, "content-type must be application/json", "content-type", "unsupported_media_type")
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(receive, max_bytes)
    except TimeoutError:
        raise HttpError(408, "the request body did not arrive in time", code="request_timeout") from None
    return _parse(body) if len(body) <= LOOP_PARSE_BYTES else await asyncio.to_thread(_parse, body)


async def _read(receive: Receive, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in _chunks(receive):
        num_bytes += len(chunk)
        if num_bytes <= max_bytes:
            chunks.append(chunk)
        elif num_bytes > max_bytes + MAX_DRAINED_BYTES:
            break
    if num_bytes > max_bytes:
        message = f"the request body is larger than {max_bytes} bytes"
        raise HttpError(413, message, code="request_too_large", headers={"connection": "close"})
    return b"".join(chunks)


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        more = message.get("more_body", False)


def _parse(body: bytes) -> object:
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise HttpError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


@asynccontextmanager
async def unless_gone(receive: Receive) -> AsyncIterator[None]:
    """Run the block; if the client disconnects meanwhile, cancel it and raise ClientGone. The body must be read."""
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_raise_when_gone(receive), name="gateway.client")
            try:
                yield
            finally:
                watch.cancel()
    except BaseExceptionGroup as group:
        raise first_cause(group) from None


async def _raise_when_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone


def hooks_in(headers: Headers) -> Iterator[tuple[str, str]]:
    """Test hooks as call metadata. Raises HttpError (400) for characters that metadata cannot carry."""
    for name in HOOK_HEADERS:
        value = headers.get(name)
        if value is None:
            continue
        if not _GRPC_TEXT.match(value) or len(value) > MAX_HOOK_CHARS:
            message = f"{name}: only printable ASCII, at most {MAX_HOOK_CHARS} characters"
            raise HttpError(400, message, name, "invalid_value")
        yield name, value


def affinity_in(headers: Headers) -> str:
    """The session's key, "" without. Raises HttpError (400) for one that is too long."""
    value = headers.get(AFFINITY_HEADER, "")
    if len(value) > MAX_AFFINITY_CHARS:
        message = f"{AFFINITY_HEADER}: longer than {MAX_AFFINITY_CHARS} characters"
        raise HttpError(400, message, AFFINITY_HEADER, "invalid_value")
    return value
