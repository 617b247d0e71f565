"""One answer on the ASGI level: either JSON at once or a stream of events. Remembers whether it has begun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from services.gateway import sse
from services.gateway.observe import Seen


class Reply:
    """Adds the request's and the trace's id to every answer."""

    def __init__(self, send: Send, seen: Seen) -> None:
        self._send = send
        self._seen = seen
        self.started = False

    async def json(self, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        """A whole answer."""
        content = sse.to_json(body)
        length = {"content-type": "application/json", "content-length": str(len(content))}
        await self._start(status, {**length, **(headers or {})})
        await self._body(content, more=False)

    async def open_stream(self) -> None:
        """Status 200 and the headers of an event stream."""
        await self._start(200, sse.HEADERS)

    async def write(self, data: bytes) -> None:
        """Bytes of the stream; waits for a slow client."""
        if data:
            await self._body(data, more=True)

    async def close_stream(self, data: bytes) -> None:
        """The stream's last bytes."""
        await self._body(data, more=False)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._seen.status = status
        self.started = True
        pairs = {**headers, **self._seen.headers()}.items()
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
