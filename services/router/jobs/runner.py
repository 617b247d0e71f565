"""Runs items of jobs on what is idle: claims, beats, commits, gives back.

Owns when an item is claimed and what its failure means. That each has one result is the store's, that online requests
go first the desk's. One runner per router; several on one store share the work.

    claim ──run──▶ commit | give back (try again later) | void (cancelled, expired, taken by another)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from meshfire.api.router.v1 import job_service_pb2 as pb
from meshfire.errors import DeadlineExceeded, InternalError, MeshfireError, StoreUnavailable
from meshfire.store.files import Files
from meshfire.store.job_claims import JobClaims
from meshfire.store.job_values import Claim
from meshfire.store.jobs import Jobs
from services.router.generate import Parts
from services.router.jobs import wire
from services.router.jobs.item import ItemDone, run_item

_log = logging.getLogger(__name__)

#: first and longest pause before an item is tried again, and before a store that is away is asked again
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class Pace:
    """How often things are done, in seconds."""

    #: the store is asked for work
    poll_s: float = 1.0
    #: holders say that they live; `silent_s` without it makes them dead
    beat_s: float = 5.0
    silent_s: float = 30.0
    #: one attempt at an item
    attempt_s: float = 3600.0
    #: attempts that ended with a defect before the item fails; what is only away is waited for
    max_defects: int = 5


class JobRunner:
    """`run` lives in the router's tasks until it is cancelled; then what runs is given back."""

    def __init__(self, parts: Parts, jobs: Jobs, claims: JobClaims, files: Files, pace: Pace) -> None:
        self._parts = parts
        self._jobs = jobs
        self._claims = claims
        self._files = files
        self._pace = pace
        self._tasks: dict[asyncio.Task[None], Claim] = {}
        self._work = asyncio.Event()

    def wake(self) -> None:
        """There may be something to do: a job came, or room."""
        self._work.set()

    async def run(self) -> None:
        """Claim and run until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep(self._beat, self._pace.beat_s), name="jobs-beat")
            group.create_task(self._keep(self._tidy, self._pace.beat_s), name="jobs-tidy")
            try:
                await self._keep(lambda: self._fill(group), 0.0)
            finally:
                await self._give_all_back()

    async def _keep(self, step: Callable[[], Awaitable[None]], pause_s: float) -> None:
        """Do a step again and again; a store that is away is asked again, ever less often."""
        failures = 0
        while True:
            try:
                await step()
                failures = 0
            except StoreUnavailable as error:
                failures += 1
                _log.warning("jobs wait for the store: %s", error)
            await asyncio.sleep(pause_s if not failures else _pause_s(failures))

    async def _fill(self, group: asyncio.TaskGroup) -> None:
        """Claim what there is room for, then wait for a sign or for a moment."""
        desk = self._parts.admission.desk
        for model, num_waiting in (await self._claims.waiting()).items():
            room = min(num_waiting, desk.idle_room(model) - self._num_unplaced(model))
            if room <= 0:
                continue
            for claim in await self._claims.claim(model, room):
                task = group.create_task(self._serve(claim), name=f"job {claim.job_id} {claim.position}")
                self._tasks[task] = claim
                task.add_done_callback(self._ended)
        self._work.clear()
        try:
            async with asyncio.timeout(self._pace.poll_s):
                await self._work.wait()
        except TimeoutError:
            pass

    def _num_unplaced(self, model: str) -> int:
        """Claimed items that the desk does not know yet: they are being encoded."""
        mine = Counter(claim.model for claim in self._tasks.values())[model]
        return max(0, mine - self._parts.admission.desk.num_asynchronous(model))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._work.set()

    async def _serve(self, claim: Claim) -> None:
        try:
            await self._finish(claim, await self._attempt(claim))
        except MeshfireError as error:
            await self._failed(claim, error)
        except Exception:
            # A defect in one item must not end the others, nor the process.
            _log.exception("job %s item %d", claim.job_id, claim.position)
            await self._failed(claim, InternalError("the router failed; its log says why"))

    async def _attempt(self, claim: Claim) -> ItemDone:
        left_s = min(self._pace.attempt_s, claim.expires_at - time.time())
        return await run_item(self._parts, claim, asyncio.get_running_loop().time() + max(0.0, left_s))

    async def _failed(self, claim: Claim, error: MeshfireError) -> None:
        defect = isinstance(error, InternalError)
        waits = error.retryable or isinstance(error, DeadlineExceeded)
        if waits or (defect and claim.num_attempts + 1 < self._pace.max_defects):
            _log.info("job %s item %d is tried again: %s", claim.job_id, claim.position, error)
            await _until_stored(lambda: self._claims.give_back(claim, _pause_s(claim.num_attempts + 1)))
            return
        outcome = pb.JobOutcome(error=wire.error_to(error))
        await _until_stored(lambda: self._claims.commit(claim, outcome.SerializeToString(), [], succeeded=False))

    async def _finish(self, claim: Claim, done: ItemDone) -> None:
        result = done.outcome.SerializeToString()
        if not await _until_stored(lambda: self._claims.commit(claim, result, done.lines, succeeded=True)):
            _log.info("job %s item %d: the result came too late and is dropped", claim.job_id, claim.position)

    async def _beat(self) -> None:
        tasks = dict(self._tasks)
        void = await self._claims.beat(list(tasks.values()))
        for task, claim in tasks.items():
            if claim in void:
                task.cancel()

    async def _tidy(self) -> None:
        await self._claims.reclaim(self._pace.silent_s)
        await self._jobs.expire()
        await self._jobs.forget()
        await self._files.forget()

    async def _give_all_back(self) -> None:
        claims = list(self._tasks.values())
        for task in tuple(self._tasks):
            task.cancel()
        for claim in claims:
            try:
                await self._claims.give_back(claim, 0.0)
            except StoreUnavailable as error:
                # Nobody beats for it any more: another router takes it over.
                _log.warning("job %s item %d was not given back: %s", claim.job_id, claim.position, error)


async def _until_stored(write: Callable[[], Awaitable[bool]]) -> bool:
    """A result must not be lost for a store that is away for a while: try until it is written or refused."""
    failures = 0
    while True:
        try:
            return await write()
        except StoreUnavailable as error:
            failures += 1
            _log.warning("a result waits for the store: %s", error)
            await asyncio.sleep(_pause_s(failures))


def _pause_s(attempts: int) -> float:
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(attempts - 1, 16))
