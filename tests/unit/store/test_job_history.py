"""Routers that die at any moment and clocks that jump, on both databases, judged by the history checker; and the
checker, on stores that break their promises."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from sqlalchemy import delete, update

from meshfire.metering.neurons import Tokens
from meshfire.store.database import Database
from meshfire.store.job_claims import JobClaims
from meshfire.store.job_values import Claim, NewItem, NewJob
from meshfire.store.jobs import Jobs
from meshfire.store.ledger import Line
from meshfire.store.schema import job_items, jobs
from tests.chaos.history import History, snapshot

ACCOUNTS = ["a" * 32, "b" * 32]
SILENT_S = 0.4


class World:
    """A store, a clock that jumps, routers that come and go, and what submitters were told."""

    def __init__(self, database: Database, seed: int, claims: type[JobClaims] = JobClaims) -> None:
        self.database = database
        self.history = History()
        self.random = random.Random(seed)
        self.skew_s = 0.0
        self._claims = claims
        self.jobs = Jobs(database, retention_s=10**7, clock=self.wall)

    def wall(self) -> float:
        return 1_764_590_400.0 + asyncio.get_running_loop().time() + self.skew_s

    def claims(self) -> JobClaims:
        return self._claims(
            self.database, retention_s=10**7, monotonic=asyncio.get_running_loop().time, clock=self.wall
        )

    async def submit(self, num_items: int) -> None:
        references = [f"r{index}" for index in range(num_items)]
        items = tuple(NewItem(one, one.encode()) for one in references)
        new = NewJob(self.random.choice(ACCOUNTS), "k", "m", b"", items, self.wall() + 10**6)
        job = await self.jobs.submit(new)
        self.history.acknowledged[job.job_id] = references

    async def router(self) -> None:
        """A router's life: claim, beat, commit, take over from the dead. Cancelled without a word, as if killed."""
        claims, held = self.claims(), list[Claim]()
        name = self.random.randrange(10**9)
        while True:
            held += await claims.claim("m", self.random.randint(1, 6))
            for void in await claims.beat(held):
                held.remove(void)
            await asyncio.sleep(self.random.random() * 0.01)
            for claim in [one for one in held if self.random.random() < 0.7]:
                held.remove(claim)
                if self.random.random() < 0.1:
                    await claims.give_back(claim, 0.01)
                    continue
                await self.commit(claims, claim, name)
                if self.random.random() < 0.05:  # an answer that was lost is sent again
                    await self.commit(claims, claim, name + 1)
            await claims.reclaim(SILENT_S)

    async def commit(self, claims: JobClaims, claim: Claim, name: int) -> None:
        line = Line(
            f"{claim.job_id}-{claim.position}-0", claim.account_id, "k", "m", self.wall(), "stop", Tokens(1, 0, 1), 0, 1
        )
        result = f"{claim.request.decode()} by {name} at epoch {claim.epoch}".encode()
        await claims.commit(claim, result, [line], succeeded=self.random.random() < 0.95)

    async def look(self) -> None:
        for job_id in list(self.history.acknowledged):
            for account in ACCOUNTS:
                if (await self.jobs.list_jobs(account, limit=1)) and self.random.random() < 0.2:
                    end = await snapshot(self.database)
                    self.history.saw(job_id, end.items.get(job_id, ()))
                    return

    async def open_items(self) -> int:
        return sum(
            item.status.value in ("queued", "running")
            for items in (await snapshot(self.database)).items.values()
            for item in items
        )

    async def run(self, num_jobs: int, num_items: int, limit_s: float) -> list[str]:
        """Everything at once until all is done; then the checker's judgement."""
        routers = [asyncio.create_task(self.router()) for _ in range(3)]
        submitted = 0
        async with asyncio.timeout(limit_s):
            while True:
                if submitted < num_jobs:
                    await self.submit(num_items)
                    submitted += 1
                victim = self.random.randrange(len(routers))
                if self.random.random() < 0.3:
                    routers[victim].cancel()
                    await asyncio.wait([routers[victim]])
                    routers[victim] = asyncio.create_task(self.router())
                if self.random.random() < 0.3:
                    self.skew_s = self.random.uniform(-1800, 1800)
                await self.look()
                await asyncio.sleep(0.03)
                if submitted == num_jobs and not await self.open_items():
                    break
        for one in routers:
            one.cancel()
        await asyncio.wait(routers)
        for one in routers:
            assert one.cancelled(), one.exception()
        return self.history.judge(await snapshot(self.database))


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_promise_is_kept(database: Database, seed: int) -> None:
    world = World(database, seed)
    assert await world.run(num_jobs=8, num_items=25, limit_s=50) == []
    assert len(world.history.seen) > 20, "somebody looked while it ran"


class CommitsWhateverTheEpoch(JobClaims):
    """A planted fault: the holder of an old claim may commit, too."""

    async def commit(self, claim: Claim, result: bytes, lines: Sequence[Line], *, succeeded: bool) -> bool:
        async with self._database.write() as connection:
            key = (job_items.c.job_id == claim.job_id) & (job_items.c.position == claim.position)
            status = "succeeded" if succeeded else "failed"
            await connection.execute(update(job_items).where(key).values(status=status, result=result))
            counter = jobs.c.num_succeeded if succeeded else jobs.c.num_failed
            await connection.execute(update(jobs).where(jobs.c.id == claim.job_id).values({counter: counter + 1}))
            await self._ledger.record_in(connection, lines)
        return True


async def test_the_checker_finds_a_planted_double_commit(database: Database) -> None:
    world = World(database, 3, CommitsWhateverTheEpoch)
    found = await world.run(num_jobs=3, num_items=20, limit_s=50)
    assert any("counts" in one or "two results" in one or "another result" in one for one in found), found


@pytest.mark.parametrize("loss", ["job", "item", "result", "billing"])
async def test_the_checker_finds_a_planted_loss(database: Database, loss: str) -> None:
    world = World(database, 4)
    assert await world.run(num_jobs=2, num_items=5, limit_s=50) == []
    job_id = next(iter(world.history.acknowledged))
    first = (job_items.c.job_id == job_id) & (job_items.c.position == 0)
    async with database.write() as connection:
        if loss == "job":
            await connection.execute(delete(job_items).where(job_items.c.job_id == job_id))
            await connection.execute(delete(jobs).where(jobs.c.id == job_id))
        elif loss == "item":
            await connection.execute(delete(job_items).where(first))
        elif loss == "result":
            await connection.execute(update(job_items).where(first).values(status="queued", result=None))
    end = await snapshot(database)
    if loss == "billing":
        end = type(end)(end.jobs, end.items, {key: count for key, count in end.billed.items() if key[0] != job_id})
    assert world.history.judge(end)
