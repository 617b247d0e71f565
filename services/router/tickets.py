"""Leases that wait, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from services.router.lifecycle_events import Stage
from services.router.workers import WorkerFacts


class Priority(IntEnum):
    """Who goes first: lower values do."""

    ONLINE = 1
    ASYNCHRONOUS = 2


@dataclass(frozen=True)
class Ticket:
    """One waiting lease. The place in the queue is the request's, not the lease's."""

    priority: Priority
    #: grows with every request that the router admits
    arrival: int
    request_id: str
    model: str
    stage: Stage
    #: tokens whose KV the lease needs room for
    num_tokens: int
    #: whose turn it takes: an account
    tenant: str = ""
    #: when the request was admitted, and when it must have ended; of the router's clock
    admitted_s: float = 0.0
    deadline_s: float = float("inf")
    #: leased before: goes in front of what was not, and costs its tenant nothing more
    resumed: bool = False
    session_key: str = ""
    #: chain hashes of its full blocks, first to last
    block_hashes: tuple[bytes, ...] = ()
    #: a worker that failed last: any other one is better
    avoid: str | None = None
    #: a prefill that goes on with an output needs the revision that began it
    revision: str | None = None
    #: a decode worker computes the prompt itself, best one that lacks at most so many tokens; None = KV comes to it
    local_max_tokens: int | None = None
    #: a decode needs a worker that can read this one's KV
    kv_owner: WorkerFacts | None = None
