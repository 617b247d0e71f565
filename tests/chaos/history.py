"""The history checker of jobs: from what submitters were told and what the store holds at the end, what was broken?

It knows nothing of claims or epochs, only the promises: a job that was acknowledged is there with all its items, each
item has one result, which never changed while anybody looked, and was billed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import select

from meshfire.store.database import Database
from meshfire.store.job_values import Item, ItemStatus, Job, JobStatus
from meshfire.store.schema import job_items, jobs, ledger

FINAL = {ItemStatus.SUCCEEDED, ItemStatus.FAILED}
ENDED = {JobStatus.COMPLETED, JobStatus.FAILED}


@dataclass(frozen=True)
class Snapshot:
    """What the store holds: items by job, jobs by id, ledger lines by `job-position-…`."""

    jobs: Mapping[str, Job]
    items: Mapping[str, Sequence[Item]]
    #: ledger lines by (job, position)
    billed: Mapping[tuple[str, int], int]


@dataclass
class History:
    """Written while things happen."""

    #: job id → references of its items, once its submission was acknowledged
    acknowledged: dict[str, list[str]] = field(default_factory=dict)
    #: the first result that anybody saw of an item
    seen: dict[tuple[str, int], bytes] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def saw(self, job_id: str, items: Sequence[Item]) -> None:
        """Somebody looked at a job."""
        for item in items:
            if item.result is None or item.status not in FINAL:
                continue
            first = self.seen.setdefault((job_id, item.position), item.result)
            if first != item.result:
                self.violations.append(f"{job_id}[{item.position}] had two results")

    def judge(self, end: Snapshot) -> list[str]:
        """Every broken promise, in words. Empty = all were kept."""
        found = list(self.violations)
        for job_id, references in self.acknowledged.items():
            found += self._judge_job(job_id, references, end)
        known = {(job_id, index) for job_id, refs in self.acknowledged.items() for index in range(len(refs))}
        for key, count in end.billed.items():
            if key in known and count != 1:
                found.append(f"{key[0]}[{key[1]}] was billed {count} times")
        return found

    def _judge_job(self, job_id: str, references: Sequence[str], end: Snapshot) -> list[str]:
        job, items = end.jobs.get(job_id), end.items.get(job_id, ())
        if job is None:
            return [f"{job_id} was acknowledged and is lost"]
        found = []
        if [item.reference for item in items] != list(references):
            found.append(f"{job_id} lost items: {len(items)} of {len(references)} are there")
        for item in items:
            name = f"{job_id}[{item.position}]"
            if item.status not in FINAL or item.result is None:
                found.append(f"{name} has no result: it is {item.status.value}")
            elif self.seen.get((job_id, item.position), item.result) != item.result:
                found.append(f"{name} has another result than was seen before")
            if item.status is ItemStatus.SUCCEEDED and end.billed.get((job_id, item.position), 0) == 0:
                found.append(f"{name} was not billed")
        counted = Counter(item.status for item in items)
        told = (job.num_succeeded, job.num_failed)
        if told != (counted[ItemStatus.SUCCEEDED], counted[ItemStatus.FAILED]):
            found.append(f"{job_id} counts {told}, its items are {dict(counted)}")
        if job.status not in ENDED:
            found.append(f"{job_id} has not ended: it is {job.status.value}")
        return found


async def snapshot(database: Database) -> Snapshot:
    """Read all at once, around every class of the product but the tables."""
    async with database.read() as connection:
        job_rows = (await connection.execute(select(jobs))).all()
        item_rows = (
            await connection.execute(select(job_items).order_by(job_items.c.job_id, job_items.c.position))
        ).all()
        names = list((await connection.execute(select(ledger.c.request_id))).scalars())
    items: dict[str, list[Item]] = {}
    for row in item_rows:
        item = Item(row.position, row.reference, row.request, ItemStatus(row.status), row.result)
        items.setdefault(row.job_id, []).append(item)
    billed: Counter[tuple[str, int]] = Counter()
    for name in names:
        job_id, _, rest = name.rpartition("-")[0].rpartition("-")
        if rest.isdigit():
            billed[job_id, int(rest)] += 1
    found = {
        row.id: Job(
            row.id,
            row.account_id,
            row.key_id,
            row.model,
            row.label,
            JobStatus(row.status),
            row.num_items,
            row.num_succeeded,
            row.num_failed,
            row.created_at / 1000,
            None,
            None,
            row.expires_at / 1000,
        )
        for row in job_rows
    }
    return Snapshot(found, items, billed)
