"""Jobs as values. Requests and results are opaque bytes here: what they mean is the router's and the gateway's."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class JobStatus(enum.Enum):
    """Where a job is. It fails only if none of its items succeeded."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


OPEN = frozenset({JobStatus.QUEUED, JobStatus.RUNNING})


class ItemStatus(enum.Enum):
    """Where an item is. The last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class EventKind(enum.Enum):
    """What is told of a job."""

    QUEUED = "queued"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True)
class NewItem:
    """One request of a job. With `refused` it has failed already: that is its result."""

    reference: str
    request: bytes
    refused: bytes | None = None


@dataclass(frozen=True)
class NewJob:
    """What is submitted. `expires_at` in seconds since 1970: what has not run by then is given up."""

    account_id: str
    key_id: str
    model: str
    label: bytes
    items: tuple[NewItem, ...]
    expires_at: float


@dataclass(frozen=True)
class Job:
    """A job without its items. Times in seconds since 1970."""

    job_id: str
    account_id: str
    key_id: str
    model: str
    label: bytes
    status: JobStatus
    num_items: int
    num_succeeded: int
    num_failed: int
    created_at: float
    started_at: float | None
    ended_at: float | None
    expires_at: float


@dataclass(frozen=True)
class Item:
    """One request of a job, as its owner sees it."""

    position: int
    reference: str
    request: bytes
    status: ItemStatus
    result: bytes | None


@dataclass(frozen=True)
class Claim:
    """The right to run an item. Whoever claims it later has a higher epoch, and this one is void."""

    job_id: str
    position: int
    epoch: int
    #: earlier claims of it
    num_attempts: int
    request: bytes
    account_id: str
    key_id: str
    model: str
    expires_at: float


@dataclass(frozen=True)
class JobEvent:
    """Something happened to a job. `event_id` grows."""

    event_id: int
    job_id: str
    account_id: str
    model: str
    kind: EventKind
    message: str
    created_at: float
    num_attempts: int = 0
