"""How many requests an account made this minute: one counter for all gateways on the same store."""

from __future__ import annotations

from sqlalchemy import delete
from sqlalchemy.dialects import postgresql, sqlite

from meshfire.store.clock import Clock, wall_clock
from meshfire.store.database import Database
from meshfire.store.schema import request_windows

MINUTE_S = 60
#: minutes that are kept; older ones are removed when a new one begins
_KEPT = 5


class RequestWindows:
    """Counters by (account, scope, minute). A scope is what has a limit of its own: a task, or a model."""

    def __init__(self, database: Database, clock: Clock = wall_clock) -> None:
        self._database = database
        self._clock = clock

    async def count(self, account_id: str, scope: str) -> tuple[int, float]:
        """Count one request; how many this minute has now, and seconds until the next one begins."""
        now = self._clock()
        minute = int(now // MINUTE_S)
        dialect = sqlite if self._database.dialect == "sqlite" else postgresql
        values = {"account_id": account_id, "scope": scope, "minute": minute, "num_requests": 1}
        more = (
            dialect.insert(request_windows)
            .values(values)
            .on_conflict_do_update(
                index_elements=["account_id", "scope", "minute"],
                set_={"num_requests": request_windows.c.num_requests + 1},
            )
            .returning(request_windows.c.num_requests)
        )
        async with self._database.write() as connection:
            counted: int = (await connection.execute(more)).scalar_one()
            if counted == 1:
                await connection.execute(delete(request_windows).where(request_windows.c.minute < minute - _KEPT))
        return counted, MINUTE_S - now % MINUTE_S
