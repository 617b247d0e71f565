"""Events of jobs: written in the transaction that makes them true, read in order, delivered at least once."""

from __future__ import annotations

from sqlalchemy import Row, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from meshfire.store.clock import Clock, millis, wall_clock
from meshfire.store.database import Database
from meshfire.store.job_values import EventKind, JobEvent
from meshfire.store.schema import job_events


async def post(
    connection: AsyncConnection, job_id: str, account_id: str, model: str, kind: EventKind, message: str, now_ms: int
) -> None:
    """Note an event, due for delivery at once."""
    values = {
        "job_id": job_id,
        "account_id": account_id,
        "model": model,
        "kind": kind.value,
        "message": message,
        "created_at": now_ms,
        "num_attempts": 0,
        "due_at": now_ms,
    }
    await connection.execute(insert(job_events).values(values))


class JobOutbox:
    """Reads events, and keeps account of their delivery."""

    def __init__(self, database: Database, clock: Clock = wall_clock) -> None:
        self._database = database
        self._clock = clock

    async def last_id(self) -> int:
        """Of the newest event; 0 = there is none."""
        async with self._database.read() as connection:
            newest: int | None = (await connection.execute(select(func.max(job_events.c.id)))).scalar_one_or_none()
        return newest or 0

    async def after(self, event_id: int, account_id: str, limit: int = 100) -> list[JobEvent]:
        """An account's events after one, in order."""
        query = select(job_events).where(job_events.c.id > event_id, job_events.c.account_id == account_id)
        async with self._database.read() as connection:
            rows = (await connection.execute(query.order_by(job_events.c.id).limit(limit))).all()
        return [_event(row) for row in rows]

    async def due(self, lease_s: float, limit: int = 20) -> list[JobEvent]:
        """Take events to deliver; nobody else gets them for `lease_s`."""
        now_ms = millis(self._clock())
        first = (
            select(job_events.c.id)
            .where(job_events.c.due_at <= now_ms)
            .order_by(job_events.c.id)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        async with self._database.write() as connection:
            chosen = list((await connection.execute(first)).scalars())
            take = (
                update(job_events)
                .where(job_events.c.id.in_(chosen))
                .values(due_at=millis(self._clock() + lease_s), num_attempts=job_events.c.num_attempts + 1)
            )
            await connection.execute(take)
            query = select(job_events).where(job_events.c.id.in_(chosen)).order_by(job_events.c.id)
            return [_event(row) for row in (await connection.execute(query)).all()]

    async def settle(self, event_id: int, retry_after_s: float | None) -> None:
        """Delivered or given up (None), or to be tried again."""
        due_at = None if retry_after_s is None else millis(self._clock() + retry_after_s)
        async with self._database.write() as connection:
            await connection.execute(update(job_events).where(job_events.c.id == event_id).values(due_at=due_at))


def _event(row: Row[tuple[object, ...]]) -> JobEvent:
    return JobEvent(
        row.id,
        row.job_id,
        row.account_id,
        row.model,
        EventKind(row.kind),
        row.message,
        row.created_at / 1000,
        row.num_attempts,
    )
