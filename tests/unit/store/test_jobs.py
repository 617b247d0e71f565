"""Jobs on both databases: whole or not at all, one result an item, and what is told of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from meshfire.errors import BadInput, NotFound, StoreUnavailable
from meshfire.metering.neurons import Tokens
from meshfire.store.database import Database
from meshfire.store.job_claims import JobClaims
from meshfire.store.job_outbox import JobOutbox
from meshfire.store.job_values import Claim, ItemStatus, Job, JobStatus, NewItem, NewJob
from meshfire.store.jobs import Jobs
from meshfire.store.ledger import Ledger, Line

NOON = 1_764_590_400.0
RETENTION_S = 1000.0


@dataclass
class Clocks:
    """Wall and monotonic: tests move them apart."""

    wall: float = NOON
    monotonic: float = 0.0


class Store:
    """One router's view of the store."""

    def __init__(self, database: Database, clocks: Clocks) -> None:
        self.clocks = clocks
        self.jobs = Jobs(database, retention_s=RETENTION_S, clock=lambda: clocks.wall)
        self.claims = JobClaims(
            database, retention_s=RETENTION_S, monotonic=lambda: clocks.monotonic, clock=lambda: clocks.wall
        )
        self.outbox = JobOutbox(database, clock=lambda: clocks.wall)
        self.ledger = Ledger(database)

    async def submit(self, count: int, account: str = "a" * 32, *, refused: int = 0, left_s: float = 500.0) -> Job:
        items = [NewItem(f"ref-{index}", f"request {index}".encode()) for index in range(count)]
        items += [NewItem(f"bad-{index}", b"", refused=b"no") for index in range(refused)]
        new = NewJob(account, "k" * 32, "m", b"label", tuple(items), self.clocks.wall + left_s)
        return await self.jobs.submit(new)

    async def commit(self, claim: Claim, *, succeeded: bool = True) -> bool:
        name = f"{claim.job_id}-{claim.position}"
        line = Line(name, claim.account_id, claim.key_id, "m", self.clocks.wall, "stop", Tokens(5, 0, 2), 0, 7)
        return await self.claims.commit(claim, f"epoch {claim.epoch}".encode(), [line], succeeded=succeeded)

    async def billed(self) -> int:
        return sum(one.num_requests for one in await self.ledger.sums([]))


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database, Clocks())


async def test_a_job_from_submission_to_its_results(store: Store) -> None:
    job = await store.submit(3, refused=1)
    assert (job.status, job.num_items, job.num_failed, job.label) == (JobStatus.QUEUED, 4, 1, b"label")
    claims = await store.claims.claim("m", 10)
    assert [claim.request for claim in claims] == [b"request 0", b"request 1", b"request 2"]
    assert (await store.jobs.job(job.account_id, job.job_id)).status is JobStatus.RUNNING
    for claim in claims:
        assert await store.commit(claim, succeeded=claim.position != 1)
    done = await store.jobs.job(job.account_id, job.job_id)
    assert (done.status, done.num_succeeded, done.num_failed) == (JobStatus.COMPLETED, 2, 2)
    items = await store.jobs.items(job.account_id, job.job_id)
    assert [(item.reference, item.status.value, item.result) for item in items] == [
        ("ref-0", "succeeded", b"epoch 1"),
        ("ref-1", "failed", b"epoch 1"),
        ("ref-2", "succeeded", b"epoch 1"),
        ("bad-0", "failed", b"no"),
    ]
    assert await store.billed() == 3
    events = await store.outbox.after(0, job.account_id)
    assert [event.kind.value for event in events] == ["queued", "succeeded"]


async def test_a_job_of_nothing_but_refused_items_has_failed_at_once(store: Store) -> None:
    job = await store.submit(0, refused=2)
    assert job.status is JobStatus.FAILED
    assert await store.claims.claim("m", 10) == []


async def test_only_the_newest_claim_can_commit(store: Store) -> None:
    job = await store.submit(1)
    (old,) = await store.claims.claim("m", 1)
    assert await store.claims.give_back(old, pause_s=5.0)
    assert await store.claims.claim("m", 1) == [], "it is not due yet"
    store.clocks.wall += 5
    (new,) = await store.claims.claim("m", 1)
    assert not await store.commit(old)
    assert not await store.claims.give_back(old, 0.0)
    assert await store.commit(new)
    assert not await store.commit(new), "once"
    (item,) = await store.jobs.items(job.account_id, job.job_id)
    assert item.result == f"epoch {new.epoch}".encode()
    assert await store.billed() == 1


async def test_a_holder_that_stands_still_is_dead_and_one_that_beats_is_not(store: Store) -> None:
    await store.submit(2)
    quiet, lively = await store.claims.claim("m", 2)
    assert await store.claims.reclaim(10.0) == 0
    for _ in range(3):
        store.clocks.monotonic += 4
        assert await store.claims.beat([lively]) == []
        reclaimed = await store.claims.reclaim(10.0)
    assert reclaimed == 1
    assert await store.claims.beat([quiet, lively]) == [quiet]
    (again,) = await store.claims.claim("m", 2)
    assert again.position == quiet.position
    assert not await store.commit(quiet)


async def test_a_wall_clock_that_jumps_makes_nobody_dead(store: Store) -> None:
    await store.submit(1, left_s=10**6)
    (claim,) = await store.claims.claim("m", 1)
    for jump_s in (0, 3600, -7200):
        store.clocks.wall += jump_s
        store.clocks.monotonic += 6
        await store.claims.beat([claim])
        assert await store.claims.reclaim(10.0) == 0
    assert await store.commit(claim)


async def test_routers_never_claim_the_same_item(store_url: str) -> None:
    databases = [await Database.open(store_url) for _ in range(3)]
    stores = [Store(one, Clocks()) for one in databases]
    job = await stores[0].submit(60)

    async def run(one: Store) -> list[tuple[int, bool]]:
        done = []
        while claims := await one.claims.claim("m", 4):
            done += [(claim.position, await one.commit(claim)) for claim in claims]
        return done

    async with asyncio.timeout(40):
        while True:
            results = [result for part in await asyncio.gather(*map(run, stores)) for result in part]
            if results:
                committed = [position for position, ok in results if ok]
                assert sorted(committed) == list(range(60))
                break
    assert (await stores[1].jobs.job(job.account_id, job.job_id)).status is JobStatus.COMPLETED
    assert await stores[2].billed() == 60
    for database in databases:
        await database.close()


async def test_accounts_take_turns(store: Store) -> None:
    await store.submit(20, "a" * 32)
    await store.submit(3, "b" * 32)
    first = await store.claims.claim("m", 6)
    assert sorted(claim.account_id[0] for claim in first) == ["a", "a", "a", "b", "b", "b"]


async def test_cancelling_voids_what_runs(store: Store) -> None:
    job = await store.submit(3)
    claim, *_ = await store.claims.claim("m", 1)
    cancelled = await store.jobs.cancel(job.account_id, job.job_id)
    assert cancelled.status is JobStatus.CANCELLED
    assert await store.claims.beat([claim]) == [claim]
    assert not await store.commit(claim)
    assert await store.claims.claim("m", 5) == []
    items = await store.jobs.items(job.account_id, job.job_id)
    assert {item.status for item in items} == {ItemStatus.CANCELLED}
    assert (await store.jobs.cancel(job.account_id, job.job_id)).status is JobStatus.CANCELLED
    kinds = [event.kind.value for event in await store.outbox.after(0, job.account_id)]
    assert kinds == ["queued", "failed"]


async def test_time_that_is_over(store: Store) -> None:
    job = await store.submit(2, left_s=100.0)
    (claim,) = await store.claims.claim("m", 1)
    assert await store.commit(claim)
    store.clocks.wall += 100
    assert await store.claims.claim("m", 5) == []
    assert await store.jobs.expire() == 1
    assert (await store.jobs.job(job.account_id, job.job_id)).status is JobStatus.EXPIRED
    store.clocks.wall += RETENTION_S
    assert await store.jobs.forget() == 1
    with pytest.raises(NotFound):
        await store.jobs.job(job.account_id, job.job_id)


async def test_an_account_sees_its_own_jobs_only(store: Store) -> None:
    jobs = []
    for _ in range(5):
        store.clocks.wall += 1
        jobs.append(await store.submit(1))
    other = await store.submit(1, "b" * 32)
    mine = jobs[0].account_id
    first = await store.jobs.list_jobs(mine, limit=2)
    rest = await store.jobs.list_jobs(mine, after=first[-1].job_id)
    assert [job.job_id for job in (*first, *rest)] == [job.job_id for job in reversed(jobs)]
    for call in (store.jobs.job, store.jobs.items, store.jobs.cancel):
        with pytest.raises(NotFound):
            await call(mine, other.job_id)


async def test_wrong_jobs_name_the_field(store: Store) -> None:
    with pytest.raises(BadInput) as caught:
        await store.submit(0)
    assert caught.value.field == "items"
    long = NewItem("x" * 513, b"")
    with pytest.raises(BadInput) as caught:
        await store.jobs.submit(NewJob("a" * 32, "k", "m", b"", (long,), NOON + 1))
    assert caught.value.field == "items[0].reference"


async def test_an_event_is_delivered_until_somebody_says_so(store: Store) -> None:
    await store.submit(1)
    (event,) = await store.outbox.due(lease_s=30)
    assert await store.outbox.due(lease_s=30) == [], "somebody is at it"
    await store.outbox.settle(event.event_id, retry_after_s=60)
    store.clocks.wall += 60
    (again,) = await store.outbox.due(lease_s=30)
    assert (again.event_id, again.num_attempts) == (event.event_id, 2)
    store.clocks.wall += 31
    (third,) = await store.outbox.due(lease_s=30)
    await store.outbox.settle(third.event_id, None)
    store.clocks.wall += 10**6
    assert await store.outbox.due(lease_s=30) == []


async def test_a_full_disk_refuses_the_job_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    """SQLite's own limit on the file's size stands for the disk's end."""
    database = await Database.open(f"sqlite:///{tmp_path / 'store.db'}")
    store = Store(database, Clocks())
    before = await store.submit(3)
    async with database.read() as connection:
        pages = (await connection.execute(text("PRAGMA page_count"))).scalar_one()
    engine = database._engine

    def limit(connection: Any, record: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages + 20}")

    event.listen(engine.sync_engine, "connect", limit)
    await engine.dispose()
    with pytest.raises(StoreUnavailable, match="full"):
        await store.submit(5000)
    assert [job.job_id for job in await store.jobs.list_jobs(before.account_id)] == [before.job_id]
    assert len(await store.claims.claim("m", 100)) == 3
    assert len(await store.outbox.after(0, before.account_id)) == 1
    small = await store.submit(2)
    assert small.status is JobStatus.QUEUED, "what fits is taken again"
    await database.close()
