"""The parts of asynchronous jobs, wired: what a router with a store has besides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from meshfire.store.database import Database
from meshfire.store.files import Files
from meshfire.store.job_claims import JobClaims
from meshfire.store.job_outbox import JobOutbox
from meshfire.store.jobs import Jobs
from services.router.config import RouterSettings
from services.router.generate import Parts
from services.router.jobs.runner import JobRunner, Pace
from services.router.jobs.servicer import JobServicer
from services.router.jobs.webhook import Webhook


@dataclass(frozen=True)
class JobSystem:
    """`servicer` answers, `loops` run until cancelled."""

    servicer: JobServicer
    loops: dict[str, Callable[[], Coroutine[Any, Any, None]]]


def job_system(settings: RouterSettings, database: Database, parts: Parts) -> JobSystem:
    """Raises BadInput for the webhook's settings."""
    retention_s = settings.job_retention_s
    jobs = Jobs(database, retention_s=retention_s)
    outbox = JobOutbox(database)
    claims = JobClaims(database, retention_s=retention_s, monotonic=asyncio.get_running_loop().time)
    pace = Pace(beat_s=settings.job_beat_s, silent_s=settings.job_silent_s, attempt_s=settings.job_attempt_s)
    webhook = Webhook(outbox, settings.webhook_url, settings.webhook_secret) if settings.webhook_url else None
    runner = JobRunner(parts, jobs, claims, Files(database, retention_s=retention_s), pace)
    loops = {"jobs": runner.run} | ({"job-webhook": webhook.run} if webhook is not None else {})
    servicer = JobServicer(jobs, outbox, default_window_s=settings.job_window_s, on_submitted=runner.wake)
    return JobSystem(servicer, loops)
