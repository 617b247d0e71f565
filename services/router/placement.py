"""Who gets a lease: pure choices among workers that have room.

Prefill: the session's worker by rendezvous hash, so that affinity is a function that every router and every restart
computes alike; when that worker has no room, the next one in the session's own order. Without a session the worker with
most free slots. What is in a worker's prefix cache is not known here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from services.router.lifecycle_events import Stage
from services.router.tickets import Ticket
from services.router.workers import Worker


class Wait(Enum):
    """Why a lease is not placed now."""

    #: nobody could take it; others may go first
    NO_SLOT = auto()
    #: somebody has a slot, but too few blocks: nobody may overtake it to that worker, or it would wait for ever
    NO_BLOCKS = auto()


@dataclass(frozen=True)
class Crowd:
    """Workers of one model."""

    prefill: Sequence[Worker]
    decode: Sequence[Worker]


Choice: TypeAlias = Worker | Wait


def choose(ticket: Ticket, crowd: Crowd) -> Choice:
    """The worker for a lease, or why it waits."""
    able = _able(ticket, crowd)
    with_slot = [worker for worker in able if worker.free_slots > 0]
    with_room = [worker for worker in with_slot if worker.has_room(ticket.num_tokens)]
    if not with_room:
        return Wait.NO_BLOCKS if with_slot else Wait.NO_SLOT
    better = [worker for worker in with_room if worker.facts.worker_id != ticket.avoid]
    return _POLICIES[ticket.stage](ticket, better or with_room)


def _able(ticket: Ticket, crowd: Crowd) -> list[Worker]:
    """Workers that could take it at all, room aside."""
    return _readers(ticket, crowd) if ticket.stage is Stage.DECODE else _writers(ticket, crowd)


def _readers(ticket: Ticket, crowd: Crowd) -> list[Worker]:
    owner = ticket.kv_owner
    return [worker for worker in crowd.decode if owner is None or owner.fits(worker.facts)]


def _writers(ticket: Ticket, crowd: Crowd) -> list[Worker]:
    pinned = [worker for worker in crowd.prefill if ticket.revision in (None, worker.facts.revision)]
    if not crowd.decode:
        # The prompt can be computed meanwhile: a decode worker may be back before the offer expires.
        return pinned
    return [worker for worker in pinned if any(worker.facts.fits(reader.facts) for reader in crowd.decode)]


def _session_policy(ticket: Ticket, workers: Sequence[Worker]) -> Worker:
    if not ticket.session_key:
        return _most_free_policy(ticket, workers)
    return max(workers, key=lambda worker: rendezvous_score(ticket.session_key, worker.facts.worker_id))


def _most_free_policy(ticket: Ticket, workers: Sequence[Worker]) -> Worker:
    # The id breaks ties the same way every time, so that a test and a trace can be read.
    return max(workers, key=lambda worker: (worker.free_slots, worker.free_blocks, worker.facts.worker_id))


_POLICIES: dict[Stage, Callable[[Ticket, Sequence[Worker]], Worker]] = {
    Stage.PREFILL: _session_policy,
    Stage.DECODE: _most_free_policy,
}


def rendezvous_score(session_key: str, worker_id: str) -> int:
    """Highest random weight (Thaler and Ravishankar, 1998): a worker that leaves moves only its own sessions."""
    pair = f"{len(session_key)}:{session_key}{worker_id}".encode()
    return int.from_bytes(hashlib.blake2b(pair, digest_size=8).digest(), "big")
