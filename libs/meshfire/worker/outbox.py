"""What waits to be sent on one Work stream: bounded messages in order, and the newest credit.

Owns order and bound. Knows no gRPC: `requests()` is the request iterator of a stream, whoever holds it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from meshfire.api.router.v1 import work_service_pb2 as pb


class Outbox:
    """Outgoing side of one stream. A router that does not read fills it; then `post` says so instead of waiting."""

    def __init__(self, hello: pb.WorkerHello, *, max_messages: int) -> None:
        self._hello = hello
        self._max_messages = max_messages
        self._messages: deque[pb.WorkRequest] = deque()
        self._credit: pb.WorkerCredit | None = None
        self._last_credit: pb.WorkerCredit | None = None
        self._wake = asyncio.Event()

    def post(self, message: pb.WorkRequest) -> bool:
        """Queue a message; False if the bound is reached, and then the stream is of no use any more."""
        if len(self._messages) >= self._max_messages:
            return False
        self._messages.append(message)
        self._wake.set()
        return True

    def credit(self, num_slots: int, num_free_blocks: int, num_leases_seen: int, num_pending_tokens: int = 0) -> None:
        """Say how much room there is. Only the newest value is sent, and only if it differs from the last one sent."""
        self._credit = pb.WorkerCredit(
            num_slots=num_slots,
            num_free_blocks=num_free_blocks,
            num_leases_seen=num_leases_seen,
            num_pending_tokens=num_pending_tokens,
        )
        self._wake.set()

    async def requests(self) -> AsyncIterator[pb.WorkRequest]:
        """Hello, then everything posted, for as long as the stream lives."""
        yield pb.WorkRequest(hello=self._hello)
        while True:
            await self._wake.wait()
            self._wake.clear()
            # Messages first: a credit must not overtake the LeaseFinished whose slot it counts as free.
            for _ in range(len(self._messages)):
                yield self._messages.popleft()
            if self._messages:
                self._wake.set()
            credit, self._credit = self._credit, None
            if credit is not None and credit != self._last_credit:
                self._last_credit = credit
                yield pb.WorkRequest(credit=credit)
