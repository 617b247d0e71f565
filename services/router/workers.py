"""The workers that hold a stream to this router: who they are and how much room they have.

Owns credit accounting. Does not decide who gets what (placement.py) and knows no requests, only their ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.router.lifecycle_events import Stage
from services.router.prefix_view import PrefixView


@dataclass(frozen=True)
class Geometry:
    """KV of one token; two workers exchange KV only if theirs are equal."""

    num_layers: int
    block_tokens: int
    row_width: int
    dtype: int


@dataclass(frozen=True)
class WorkerFacts:
    """What a worker says of itself."""

    worker_id: str
    stage: Stage
    model: str
    revision: str
    geometry: Geometry
    #: host:port of its own server
    address: str
    context_tokens: int
    vocab_size: int
    end_token_ids: frozenset[int]

    def fits(self, other: WorkerFacts) -> bool:
        """Whether the two may exchange KV."""
        return self.revision == other.revision and self.geometry == other.geometry


class Worker:
    """One worker's room, as its credits and our leases tell.

    A credit counts the leases that the worker had seen on the stream; leases sent after those are taken off its room
    until the next credit. `held` are the requests that hold something there.
    """

    def __init__(self, facts: WorkerFacts) -> None:
        self.facts = facts
        self.held: set[str] = set()
        self.prefixes = PrefixView()
        self._num_slots = 0
        self._num_free_blocks = 0
        #: leases so far
        self.num_sent = 0
        self._num_pending_tokens = 0
        #: (blocks, tokens to compute) of leases that no credit has counted yet, oldest first
        self._uncounted: deque[tuple[int, int]] = deque()

    @property
    def free_slots(self) -> int:
        """Leases that it would take now."""
        return self._num_slots - len(self._uncounted)

    @property
    def free_blocks(self) -> int:
        """KV blocks that are free there now."""
        return self._num_free_blocks - sum(blocks for blocks, _ in self._uncounted)

    @property
    def load_tokens(self) -> int:
        """Tokens that it has still to compute, for all routers."""
        return self._num_pending_tokens + sum(tokens for _, tokens in self._uncounted)

    def credit(self, num_slots: int, num_free_blocks: int, num_leases_seen: int, num_pending_tokens: int = 0) -> None:
        """Take its word, which does not yet count the leases after `num_leases_seen`."""
        self._num_slots = num_slots
        self._num_free_blocks = num_free_blocks
        self._num_pending_tokens = num_pending_tokens
        while self._uncounted and self.num_sent - len(self._uncounted) < num_leases_seen:
            self._uncounted.popleft()

    def lease_sent(self, num_blocks: int, num_tokens: int = 0) -> None:
        """Count a lease off its room; `num_tokens` of it are to be computed."""
        self.num_sent += 1
        self._uncounted.append((num_blocks, num_tokens))

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that the KV of so many tokens takes."""
        return -(-num_tokens // self.facts.geometry.block_tokens)

    def has_room(self, num_tokens: int) -> bool:
        """Room for a lease of so many tokens. An idle worker is asked even if it seems too small: it says why not."""
        return self.free_slots > 0 and (self.free_blocks >= self.blocks_for(num_tokens) or not self.held)


class WorkerTable:
    """All workers, by id; remembers which models it has ever seen. `serves_alone`: which decode workers need no prefill
    worker."""

    def __init__(self, serves_alone: Callable[[WorkerFacts], bool] = lambda _: False) -> None:
        self._serves_alone = serves_alone
        self._workers: dict[str, Worker] = {}
        self._seen_models: set[str] = set()
        self._listeners: list[Callable[[], None]] = []

    def add(self, worker: Worker) -> None:
        """A worker joined."""
        self._workers[worker.facts.worker_id] = worker
        self._seen_models.add(worker.facts.model)
        for listener in tuple(self._listeners):
            listener()

    def remove(self, worker: Worker) -> bool:
        """A worker left; False if its id belongs to a newer stream by now."""
        if self._workers.get(worker.facts.worker_id) is not worker:
            return False
        del self._workers[worker.facts.worker_id]
        return True

    def get(self, worker_id: str) -> Worker | None:
        """The worker, if it is here."""
        return self._workers.get(worker_id)

    def of(self, model: str, stage: Stage) -> list[Worker]:
        """Workers of a model and stage."""
        return [w for w in self._workers.values() if w.facts.model == model and w.facts.stage is stage]

    def models(self) -> list[str]:
        """Models with any worker, sorted."""
        return sorted({worker.facts.model for worker in self._workers.values()})

    def has_seen(self, model: str) -> bool:
        """Whether any worker ever served the model."""
        return model in self._seen_models

    def pairs(self, model: str) -> Iterator[tuple[WorkerFacts, WorkerFacts]]:
        """Workers of a model that may serve together: who computes the prompt, and who decodes."""
        for decode in self.of(model, Stage.DECODE):
            if self._serves_alone(decode.facts):
                yield decode.facts, decode.facts
        for prefill in self.of(model, Stage.PREFILL):
            for decode in self.of(model, Stage.DECODE):
                if prefill.facts.fits(decode.facts):
                    yield prefill.facts, decode.facts

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` whenever a worker joins; returns how to stop that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)
