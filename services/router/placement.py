"""Who gets a lease: pure choices among workers that have room.

Prefill: the worker with the least to compute, which is the tokens of the prompt that its prefix cache does not hold,
plus a share of what it has to compute before. A session has a home by rendezvous hash, a function that every router and
every restart computes alike; another worker must be better by a margin, in cached tokens or in load. What caches hold
is told by the workers and may be late: a wrong guess costs time, nothing else. Decode: the worker with most free slots,
or, if it computes the prompt itself, the one with the least to compute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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


class Reason(Enum):
    """Why it is this worker."""

    #: no other could take it
    ONLY = "only"
    #: home of its session
    SESSION = "session"
    #: most of its prefix is there
    CACHE = "cache"
    #: least to do there
    LOAD = "load"


@dataclass(frozen=True)
class Placement:
    """A worker for a lease. `num_cached` tokens of it are expected to be there."""

    worker: Worker
    reason: Reason
    num_cached: int = 0


Choice: TypeAlias = Placement | Wait

#: what a token of others' work at a worker weighs against a token that is not cached there; measured on real traces
LOAD_WEIGHT = 0.7
#: the same for a session: more turns will follow, so that its prefix in one place is worth more than balance
SESSION_LOAD_WEIGHT = 0.1
#: tokens that a session would rather compute than leave its home
_AWAY_TOKENS = 1024


def choose(ticket: Ticket, crowd: Crowd) -> Choice:
    """The worker for a lease, or why it waits."""
    able = _able(ticket, crowd)
    with_slot = [worker for worker in able if worker.free_slots > 0]
    with_room = [worker for worker in with_slot if worker.has_room(ticket.num_tokens)]
    if not with_room:
        return Wait.NO_BLOCKS if with_slot else Wait.NO_SLOT
    better = [worker for worker in with_room if worker.facts.worker_id != ticket.avoid] or with_room
    if ticket.local_max_tokens is not None:
        return _local_policy(ticket, better)
    if ticket.stage is Stage.DECODE:
        return _most_free(better)
    return _prefill_policy(ticket, better, able)


def goes_local(ticket: Ticket, crowd: Crowd, max_tokens: int) -> bool:
    """Whether a prompt is for a decode worker alone: one that lacks at most `max_tokens` of it has room now, or nobody
    else could compute it."""
    if not crowd.prefill:
        return ticket.num_tokens <= max_tokens
    near = _near(ticket, crowd, max_tokens)
    return any(worker.has_room(ticket.num_tokens + 1) for worker in near)


def _able(ticket: Ticket, crowd: Crowd) -> list[Worker]:
    """Workers that could take it at all, room aside."""
    if ticket.local_max_tokens is not None:
        # Blocks that were there may be gone by now: then any one is as good.
        return _near(ticket, crowd, ticket.local_max_tokens) or _pinned(ticket, crowd.decode)
    return _readers(ticket, crowd) if ticket.stage is Stage.DECODE else _writers(ticket, crowd)


def _readers(ticket: Ticket, crowd: Crowd) -> list[Worker]:
    owner = ticket.kv_owner
    return [worker for worker in crowd.decode if owner is None or owner.fits(worker.facts)]


def _near(ticket: Ticket, crowd: Crowd, max_tokens: int) -> list[Worker]:
    """Decode workers that lack at most `max_tokens` of a prompt."""
    return [one for one in _pinned(ticket, crowd.decode) if ticket.num_tokens - _num_cached(ticket, one) <= max_tokens]


def _pinned(ticket: Ticket, workers: Sequence[Worker]) -> list[Worker]:
    return [worker for worker in workers if ticket.revision in (None, worker.facts.revision)]


def _writers(ticket: Ticket, crowd: Crowd) -> list[Worker]:
    pinned = _pinned(ticket, crowd.prefill)
    if not crowd.decode:
        # The prompt can be computed meanwhile: a decode worker may be back before the offer expires.
        return pinned
    return [worker for worker in pinned if any(worker.facts.fits(reader.facts) for reader in crowd.decode)]


def _prefill_policy(ticket: Ticket, workers: Sequence[Worker], able: Sequence[Worker]) -> Placement:
    found = {worker: _num_cached(ticket, worker) for worker in workers}
    home = _home(ticket, able)
    weight = LOAD_WEIGHT if home is None else SESSION_LOAD_WEIGHT

    def cost(worker: Worker) -> tuple[float, int, str]:
        away = _AWAY_TOKENS if home not in (None, worker) else 0
        to_compute = ticket.num_tokens - found[worker] + weight * worker.load_tokens
        # Between equals the one that got least so far: always the same would wear it out.
        return to_compute + away, worker.num_sent, worker.facts.worker_id

    best = min(workers, key=cost)
    if len(able) == 1:
        return Placement(best, Reason.ONLY, found[best])
    if best is home:
        return Placement(best, Reason.SESSION, found[best])
    return Placement(best, Reason.CACHE if found[best] else Reason.LOAD, found[best])


def _home(ticket: Ticket, able: Sequence[Worker]) -> Worker | None:
    if not ticket.session_key:
        return None
    return max(able, key=lambda worker: rendezvous_score(ticket.session_key, worker.facts.worker_id))


def _num_cached(ticket: Ticket, worker: Worker) -> int:
    """Tokens of the ticket that the worker's prefix cache should hold. The last one is always computed."""
    num_found = worker.prefixes.num_found(ticket.block_hashes) * worker.facts.geometry.block_tokens
    return max(0, min(num_found, ticket.num_tokens - 1))


def _local_policy(ticket: Ticket, workers: Sequence[Worker]) -> Placement:
    def cost(worker: Worker) -> tuple[float, int, int, str]:
        to_compute = ticket.num_tokens - _num_cached(ticket, worker) + LOAD_WEIGHT * worker.load_tokens
        return to_compute, -worker.free_slots, worker.num_sent, worker.facts.worker_id

    best = min(workers, key=cost)
    found = _num_cached(ticket, best)
    reason = Reason.CACHE if found else Reason.LOAD
    return Placement(best, reason if len(workers) > 1 else Reason.ONLY, found)


def _most_free(workers: Sequence[Worker]) -> Placement:
    # The id breaks ties the same way every time, so that a test and a trace can be read.
    best = max(workers, key=lambda worker: (worker.free_slots, worker.free_blocks, worker.facts.worker_id))
    return Placement(best, Reason.LOAD if len(workers) > 1 else Reason.ONLY)


def rendezvous_score(session_key: str, worker_id: str) -> int:
    """Highest random weight (Thaler and Ravishankar, 1998): a worker that leaves moves only its own sessions."""
    pair = f"{len(session_key)}:{session_key}{worker_id}".encode()
    return int.from_bytes(hashlib.blake2b(pair, digest_size=8).digest(), "big")
