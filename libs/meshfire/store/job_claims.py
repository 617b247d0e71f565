"""Items of jobs as their runners see them: claim, beat, commit, give back.

Owns exactly-once: a claim raises the item's epoch, and only the holder of the newest epoch can commit, in one
transaction with the item's cost and the job's counters. Whatever dies or comes late, an item has one result.

A claim lives while its holder beats. That a holder is dead is told by its beat standing still for as long as the
watcher's own monotonic clock says, so that a wall clock that jumps makes nobody dead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Update, func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from meshfire.store.clock import Clock, millis, wall_clock
from meshfire.store.database import Database
from meshfire.store.job_values import OPEN, Claim, ItemStatus, JobStatus
from meshfire.store.jobs import end_if_done
from meshfire.store.ledger import Ledger, Line
from meshfire.store.schema import job_items, jobs

#: the right to one epoch of an item: job, position, epoch
Right = tuple[str, int, int]
_KEY = (job_items.c.job_id, job_items.c.position, job_items.c.epoch)
_OPEN_VALUES = [one.value for one in OPEN]


@dataclass(frozen=True)
class _Seen:
    epoch: int
    beat: int
    since_s: float


class JobClaims:
    """`retention_s` as in `Jobs`; `monotonic` is the watcher's clock for `reclaim`."""

    def __init__(
        self,
        database: Database,
        *,
        retention_s: float,
        monotonic: Callable[[], float],
        clock: Clock = wall_clock,
    ) -> None:
        self._database = database
        self._ledger = Ledger(database)
        self._retention_ms = millis(retention_s)
        self._monotonic = monotonic
        self._clock = clock
        self._seen: dict[tuple[str, int], _Seen] = {}

    async def waiting(self) -> dict[str, int]:
        """Items that could be claimed now, by model."""
        query = (
            select(jobs.c.model, func.count())
            .join(jobs, jobs.c.id == job_items.c.job_id)
            .where(job_items.c.status == ItemStatus.QUEUED.value, job_items.c.due_at <= millis(self._clock()))
            .group_by(jobs.c.model)
        )
        async with self._database.read() as connection:
            return {row[0]: row[1] for row in await connection.execute(query)}

    async def claim(self, model: str, limit: int) -> list[Claim]:
        """Up to `limit` items of a model, accounts in turn, each account's oldest first."""
        now_ms = millis(self._clock())
        turn = func.row_number().over(
            partition_by=jobs.c.account_id, order_by=(jobs.c.created_at, jobs.c.id, job_items.c.position)
        )
        waiting = (
            select(job_items.c.job_id, job_items.c.position, turn.label("turn"), jobs.c.created_at)
            .join(jobs, jobs.c.id == job_items.c.job_id)
            .where(
                jobs.c.model == model,
                jobs.c.status.in_(_OPEN_VALUES),
                jobs.c.expires_at > now_ms,
                job_items.c.status == ItemStatus.QUEUED.value,
                job_items.c.due_at <= now_ms,
            )
            .subquery()
        )
        first = select(waiting.c.job_id, waiting.c.position).order_by(waiting.c.turn, waiting.c.created_at).limit(limit)
        async with self._database.write() as connection:
            chosen = (await connection.execute(first)).all()
            if not chosen:
                return []
            mine = (
                select(job_items.c.job_id, job_items.c.position)
                .where(
                    tuple_(job_items.c.job_id, job_items.c.position).in_([tuple(row) for row in chosen]),
                    job_items.c.status == ItemStatus.QUEUED.value,
                )
                # What another router takes at this moment is passed over. SQLite has one writer anyway.
                .with_for_update(skip_locked=True)
            )
            locked = [tuple(row) for row in await connection.execute(mine)]
            return await self._take(connection, locked, now_ms)

    async def _take(self, connection: AsyncConnection, locked: Sequence[tuple[str, int]], now_ms: int) -> list[Claim]:
        if not locked:
            return []
        take = (
            update(job_items)
            .where(tuple_(job_items.c.job_id, job_items.c.position).in_(locked))
            .values(
                status=ItemStatus.RUNNING.value,
                epoch=job_items.c.epoch + 1,
                beat=0,
                num_attempts=job_items.c.num_attempts + 1,
            )
        )
        await connection.execute(take)
        begun = {job_id for job_id, _ in locked}
        start = update(jobs).where(jobs.c.id.in_(begun), jobs.c.status == JobStatus.QUEUED.value)
        await connection.execute(start.values(status=JobStatus.RUNNING.value, started_at=now_ms))
        query = (
            select(job_items, jobs.c.account_id, jobs.c.key_id, jobs.c.model, jobs.c.expires_at)
            .join(jobs, jobs.c.id == job_items.c.job_id)
            .where(tuple_(job_items.c.job_id, job_items.c.position).in_(locked))
            .order_by(job_items.c.job_id, job_items.c.position)
        )
        return [
            Claim(
                job_id=row.job_id,
                position=row.position,
                epoch=row.epoch,
                num_attempts=row.num_attempts - 1,
                request=row.request,
                account_id=row.account_id,
                key_id=row.key_id,
                model=row.model,
                expires_at=row.expires_at / 1000,
            )
            for row in await connection.execute(query)
        ]

    async def beat(self, claims: Sequence[Claim]) -> list[Claim]:
        """Say that these run; those that are void by now: cancelled, expired, or claimed by another."""
        if not claims:
            return []
        alive = (
            update(job_items)
            .where(tuple_(*_KEY).in_([_right(one) for one in claims]), job_items.c.status == ItemStatus.RUNNING.value)
            .values(beat=job_items.c.beat + 1)
            .returning(*_KEY)
        )
        async with self._database.write() as connection:
            valid = {tuple(row) for row in await connection.execute(alive)}
        return [one for one in claims if _right(one) not in valid]

    async def commit(self, claim: Claim, result: bytes, lines: Sequence[Line], *, succeeded: bool) -> bool:
        """The item's one result, its cost with it. False, and nothing changes, if the claim is void."""
        status = ItemStatus.SUCCEEDED if succeeded else ItemStatus.FAILED
        done = _held(claim).values(status=status.value, result=result)
        counter = jobs.c.num_succeeded if succeeded else jobs.c.num_failed
        async with self._database.write() as connection:
            if (await connection.execute(done)).rowcount != 1:
                return False
            await connection.execute(update(jobs).where(jobs.c.id == claim.job_id).values({counter: counter + 1}))
            await self._ledger.record_in(connection, lines)
            await end_if_done(connection, claim.job_id, millis(self._clock()), self._retention_ms)
        return True

    async def give_back(self, claim: Claim, pause_s: float) -> bool:
        """Let somebody run it later. False if the claim is void."""
        back = _held(claim).values(
            status=ItemStatus.QUEUED.value, due_at=millis(self._clock() + pause_s), epoch=job_items.c.epoch + 1
        )
        async with self._database.write() as connection:
            return (await connection.execute(back)).rowcount == 1

    async def reclaim(self, silent_s: float) -> int:
        """Give back items whose holder's beat has stood still for `silent_s`; how many. Call it every now and then."""
        query = select(job_items.c.job_id, job_items.c.position, job_items.c.epoch, job_items.c.beat).where(
            job_items.c.status == ItemStatus.RUNNING.value
        )
        async with self._database.read() as connection:
            running = {(row[0], row[1]): (row[2], row[3]) for row in await connection.execute(query)}
        dead = self._dead(running, silent_s)
        if not dead:
            return 0
        free = (
            update(job_items)
            .where(
                tuple_(*_KEY, job_items.c.beat).in_([(*key, *running[key]) for key in dead]),
                job_items.c.status == ItemStatus.RUNNING.value,
            )
            .values(status=ItemStatus.QUEUED.value, epoch=job_items.c.epoch + 1)
        )
        async with self._database.write() as connection:
            return (await connection.execute(free)).rowcount

    def _dead(self, running: Mapping[tuple[str, int], tuple[int, int]], silent_s: float) -> list[tuple[str, int]]:
        now_s = self._monotonic()
        dead = []
        seen: dict[tuple[str, int], _Seen] = {}
        for key, (epoch, beat) in running.items():
            before = self._seen.get(key)
            same = before is not None and (before.epoch, before.beat) == (epoch, beat)
            seen[key] = before if same and before is not None else _Seen(epoch, beat, now_s)
            if now_s - seen[key].since_s >= silent_s:
                dead.append(key)
        self._seen = seen
        return dead


def _right(claim: Claim) -> Right:
    return claim.job_id, claim.position, claim.epoch


def _held(claim: Claim) -> Update:
    return update(job_items).where(
        job_items.c.job_id == claim.job_id,
        job_items.c.position == claim.position,
        job_items.c.epoch == claim.epoch,
        job_items.c.status == ItemStatus.RUNNING.value,
    )
