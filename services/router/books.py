"""Bills on their way to the ledger.

Owns that no request waits for the disk and that no line is lost while the process lives: lines are written in groups,
and kept for the next try when the store cannot be used. A router that is killed loses what it took in since its last
write, at most `FLUSH_S`; the traces still have it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from meshfire.errors import StoreUnavailable
from meshfire.store.database import Database
from meshfire.store.ledger import Ledger, Line

_log = logging.getLogger(__name__)

FLUSH_S = 0.5
#: pause after a write that failed, doubled up to the maximum
RETRY_S = 1.0
RETRY_MAX_S = 30.0
#: lines of one transaction
GROUP = 500
#: lines that wait for a store that is away; beyond it the oldest go, and the log says how many
MAX_WAITING = 100_000


class Books(Protocol):
    """Where bills go."""

    def enter(self, line: Line) -> None:
        """Take a line; never waits."""


class NoBooks:
    """A router without a store."""

    def enter(self, line: Line) -> None:
        """Nothing is kept."""


class LedgerBooks:
    """`run` writes until it is cancelled; `flush` writes all that is there."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: list[Line] = []
        self._some = asyncio.Event()

    def enter(self, line: Line) -> None:
        """Take a line."""
        self._waiting.append(line)
        self._some.set()
        if len(self._waiting) > MAX_WAITING:
            lost = self._waiting.pop(0)
            _log.error("the ledger lost request %s: the store has been away for too long", lost.request_id)

    async def run(self) -> None:
        """Write lines as they come, in groups."""
        pause_s = RETRY_S
        while True:
            await self._some.wait()
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush()
                pause_s = RETRY_S
            except StoreUnavailable as error:
                _log.warning("%d lines of the ledger wait: %s", len(self._waiting), error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)

    async def flush(self) -> None:
        """Write everything. Raises StoreUnavailable; what is not written then stays."""
        while group := self._waiting[:GROUP]:
            await self._ledger.record(group)
            # Recorded twice is harmless, lost is not: they leave only now.
            del self._waiting[: len(group)]
        self._some.clear()


async def close_books(books: LedgerBooks, database: Database) -> None:
    """Write what is left and leave the store. A store that is away must not hold up the end of the process."""
    try:
        await books.flush()
    except StoreUnavailable as error:
        _log.error("the ledger lost its last lines: %s", error)
    await database.close()
