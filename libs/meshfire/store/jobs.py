"""The job store as its submitters see it: submit, look, cancel.

Owns that a job is there as a whole or not at all, and that it is on disk when `submit` returns. Running items is
`job_claims`', telling of them `job_outbox`'.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from sqlalchemy import Row, Select, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from meshfire.errors import BadInput, NotFound
from meshfire.store.clock import Clock, millis, wall_clock
from meshfire.store.database import Database
from meshfire.store.job_outbox import post
from meshfire.store.job_values import (
    OPEN,
    EventKind,
    Item,
    ItemStatus,
    Job,
    JobStatus,
    NewJob,
)
from meshfire.store.schema import job_items, jobs

MAX_REFERENCE_CHARS = 512
MAX_ITEMS = 50_000
#: rows of one INSERT: SQLite binds 32,766 values at most
_INSERT_ROWS = 500
_OPEN_VALUES = [one.value for one in OPEN]
_UNFINISHED = [ItemStatus.QUEUED.value, ItemStatus.RUNNING.value]


class Jobs:
    """Jobs of all accounts; a caller names its own, and sees no other's. `retention_s`: results are kept so long."""

    def __init__(self, database: Database, *, retention_s: float, clock: Clock = wall_clock) -> None:
        self._database = database
        self._retention_ms = millis(retention_s)
        self._clock = clock

    async def submit(self, new: NewJob) -> Job:
        """Take a job: on disk when this returns. Raises BadInput, StoreUnavailable."""
        _check(new)
        job_id, now_ms = str(uuid.uuid4()), millis(self._clock())
        num_refused = sum(item.refused is not None for item in new.items)
        values = {
            "id": job_id,
            "account_id": new.account_id,
            "key_id": new.key_id,
            "model": new.model,
            "label": new.label,
            "status": JobStatus.QUEUED.value,
            "num_items": len(new.items),
            "num_succeeded": 0,
            "num_failed": num_refused,
            "created_at": now_ms,
            "expires_at": millis(new.expires_at),
        }
        rows = [
            {
                "job_id": job_id,
                "position": position,
                "reference": item.reference,
                "request": item.request,
                "status": (ItemStatus.QUEUED if item.refused is None else ItemStatus.FAILED).value,
                "epoch": 0,
                "beat": 0,
                "num_attempts": 0,
                "due_at": now_ms,
                "result": item.refused,
            }
            for position, item in enumerate(new.items)
        ]
        async with self._database.write() as connection:
            await connection.execute(insert(jobs).values(values))
            for start in range(0, len(rows), _INSERT_ROWS):
                await connection.execute(insert(job_items), rows[start : start + _INSERT_ROWS])
            await post(connection, job_id, new.account_id, new.model, EventKind.QUEUED, "", now_ms)
            await end_if_done(connection, job_id, now_ms, self._retention_ms)
        return await self.job(new.account_id, job_id)

    async def job(self, account_id: str, job_id: str) -> Job:
        """Raises NotFound, also for another account's."""
        async with self._database.read() as connection:
            row = (await connection.execute(_owned(account_id, job_id))).first()
        if row is None:
            raise NotFound(f"there is no job {job_id!r}", field="job_id")
        return _job(row)

    async def list_jobs(self, account_id: str, *, after: str | None = None, limit: int = 20) -> list[Job]:
        """Newest first; `after` = the last one of the page before. Raises NotFound for that."""
        query = select(jobs).where(jobs.c.account_id == account_id)
        if after is not None:
            last = await self.job(account_id, after)
            at_ms = millis(last.created_at)
            query = query.where(
                (jobs.c.created_at < at_ms) | ((jobs.c.created_at == at_ms) & (jobs.c.id < last.job_id))
            )
        async with self._database.read() as connection:
            rows = (
                await connection.execute(query.order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(limit))
            ).all()
        return [_job(row) for row in rows]

    async def items(self, account_id: str, job_id: str, *, first: int = 0, limit: int = MAX_ITEMS) -> list[Item]:
        """Items of a job in order, from position `first` on. Raises NotFound."""
        await self.job(account_id, job_id)
        query = select(job_items).where(job_items.c.job_id == job_id, job_items.c.position >= first)
        async with self._database.read() as connection:
            rows = (await connection.execute(query.order_by(job_items.c.position).limit(limit))).all()
        return [Item(row.position, row.reference, row.request, ItemStatus(row.status), row.result) for row in rows]

    async def cancel(self, account_id: str, job_id: str) -> Job:
        """End a job: what has not run will not, what runs is void. One that has ended stays as it is."""
        now_ms = millis(self._clock())
        async with self._database.write() as connection:
            if (await connection.execute(_owned(account_id, job_id))).first() is None:
                raise NotFound(f"there is no job {job_id!r}", field="job_id")
            await give_up(connection, [job_id], JobStatus.CANCELLED, now_ms, self._retention_ms)
        return await self.job(account_id, job_id)

    async def expire(self) -> int:
        """Give up jobs whose time is over; how many."""
        now_ms = millis(self._clock())
        query = select(jobs.c.id).where(jobs.c.status.in_(_OPEN_VALUES), jobs.c.expires_at <= now_ms)
        async with self._database.write() as connection:
            late = list((await connection.execute(query)).scalars())
            await give_up(connection, late, JobStatus.EXPIRED, now_ms, self._retention_ms)
        return len(late)

    async def forget(self) -> int:
        """Remove jobs whose results were kept long enough; how many."""
        now_ms = millis(self._clock())
        async with self._database.write() as connection:
            gone = list((await connection.execute(select(jobs.c.id).where(jobs.c.delete_at <= now_ms))).scalars())
            await connection.execute(delete(job_items).where(job_items.c.job_id.in_(gone)))
            await connection.execute(delete(jobs).where(jobs.c.id.in_(gone)))
        return len(gone)


async def give_up(
    connection: AsyncConnection, job_ids: Sequence[str], status: JobStatus, now_ms: int, retention_ms: int
) -> None:
    """End open jobs before all their items ran."""
    for job_id in job_ids:
        # Items before their job, as everywhere: two transactions that lock in one order cannot lock each other out.
        # The epoch makes a result that is on its way void.
        void = update(job_items).where(job_items.c.job_id == job_id, job_items.c.status.in_(_UNFINISHED))
        await connection.execute(void.values(status=ItemStatus.CANCELLED.value, epoch=job_items.c.epoch + 1))
        ending = (
            update(jobs)
            .where(jobs.c.id == job_id, jobs.c.status.in_(_OPEN_VALUES))
            .values(status=status.value, ended_at=now_ms, delete_at=now_ms + retention_ms)
            .returning(jobs.c.account_id, jobs.c.model)
        )
        ended = (await connection.execute(ending)).first()
        if ended is not None:
            what = f"the job was {status.value}"
            await post(connection, job_id, ended.account_id, ended.model, EventKind.FAILED, what, now_ms)


async def end_if_done(connection: AsyncConnection, job_id: str, now_ms: int, retention_ms: int) -> None:
    """End a job whose last item has ended. Call it after every change of an item's status, in its transaction."""
    left = select(func.count()).where(job_items.c.job_id == job_id, job_items.c.status.in_(_UNFINISHED))
    if (await connection.execute(left)).scalar_one():
        return
    row = (await connection.execute(select(jobs).where(jobs.c.id == job_id))).one()
    if JobStatus(row.status) not in OPEN:
        return
    failed = row.num_succeeded == 0
    status = JobStatus.FAILED if failed else JobStatus.COMPLETED
    change = update(jobs).where(jobs.c.id == job_id)
    await connection.execute(change.values(status=status.value, ended_at=now_ms, delete_at=now_ms + retention_ms))
    kind, what = (EventKind.FAILED, "every item failed") if failed else (EventKind.SUCCEEDED, "")
    await post(connection, job_id, row.account_id, row.model, kind, what, now_ms)


def _check(new: NewJob) -> None:
    if not new.items:
        raise BadInput("a job needs at least one item", field="items")
    if len(new.items) > MAX_ITEMS:
        raise BadInput(f"{len(new.items)} items, expected at most {MAX_ITEMS}", field="items")
    for position, item in enumerate(new.items):
        if len(item.reference) > MAX_REFERENCE_CHARS:
            what = f"{len(item.reference)} characters, expected at most {MAX_REFERENCE_CHARS}"
            raise BadInput(what, field=f"items[{position}].reference")


def _owned(account_id: str, job_id: str) -> Select[tuple[object, ...]]:
    return select(jobs).where(jobs.c.id == job_id, jobs.c.account_id == account_id)


def _job(row: Row[tuple[object, ...]]) -> Job:
    return Job(
        job_id=row.id,
        account_id=row.account_id,
        key_id=row.key_id,
        model=row.model,
        label=row.label,
        status=JobStatus(row.status),
        num_items=row.num_items,
        num_succeeded=row.num_succeeded,
        num_failed=row.num_failed,
        created_at=row.created_at / 1000,
        started_at=None if row.started_at is None else row.started_at / 1000,
        ended_at=None if row.ended_at is None else row.ended_at / 1000,
        expires_at=row.expires_at / 1000,
    )
