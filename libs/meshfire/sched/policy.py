"""Continuous batching: who is admitted, who gets a block, who must go when there is none.

Owns the order of sequences and the references that they hold in the block pool; every block that it takes it gives
back in `remove`. Knows nothing of leases, time or tensors. Not thread-safe: it lives on the event loop.

Admission is first come, first served: a large sequence at the head is not overtaken, so it cannot starve. Beside the
blocks of its tokens, one more per active sequence must be free, so that everybody can cross the next block border.
When a running sequence finds no block, the newest active one is preempted, itself included: the oldest is never sent
back, hence always finishes, hence all do (each fits the pool alone, which `add` checks).
"""

from __future__ import annotations

from collections import deque

from meshfire.errors import InternalError, PromptTooLong, QueueFull
from meshfire.kv.block_pool import BlockPool
from meshfire.kv.hashing import num_blocks_for
from meshfire.sched.sequence import Sequence, SequenceState


class Scheduler:
    """Sequences of one worker: waiting ones in order of arrival, active ones in order of admission."""

    def __init__(self, pool: BlockPool, *, block_tokens: int, max_active: int, max_waiting: int) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._max_active = max_active
        self._max_waiting = max_waiting
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Sequences that read their KV or run."""
        return len(self._active)

    @property
    def num_slots(self) -> int:
        """Sequences that `add` would still take."""
        return self._max_active + self._max_waiting - self.num_active - self.num_waiting

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that are free or evictable and that no waiting sequence needs."""
        wanted = sum(one.num_missing_blocks(self._block_tokens) for one in self._waiting)
        return max(0, self._pool.num_free - wanted)

    @property
    def running(self) -> list[Sequence]:
        """Sequences of the next step, oldest first."""
        return [one for one in self._active if one.state is SequenceState.RUNNING]

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises QueueFull, or PromptTooLong for one that would not fit an empty pool."""
        if self.num_slots <= 0:
            raise QueueFull(f"{self.num_active} sequences run and {self.num_waiting} wait; there is no room for more")
        needed = num_blocks_for(sequence.num_tokens, self._block_tokens)
        if needed > self._pool.num_blocks:
            raise PromptTooLong(
                f"{sequence.num_tokens} tokens need {needed} KV blocks, the worker has {self._pool.num_blocks}",
                field="token_ids",
            )
        self._waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Give blocks to waiting sequences while slots and blocks allow: WAITING → READING."""
        admitted = []
        while self._waiting and self.num_active < self._max_active and self._take_blocks(self._waiting[0]):
            sequence = self._waiting.popleft()
            sequence.state = SequenceState.READING
            self._active.append(sequence)
            admitted.append(sequence)
        return admitted

    def start(self, sequence: Sequence) -> None:
        """The KV of all its tokens is in its blocks: READING → RUNNING; its full blocks may be shared from now on."""
        if sequence.state is not SequenceState.READING:
            raise InternalError(f"a sequence cannot run: it is {sequence.state.value}")
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.state = SequenceState.RUNNING
        for index in range(sequence.num_held_blocks, sequence.num_tokens // self._block_tokens):
            self._pool.publish(sequence.block_table[index], sequence.block_hashes[index])

    def grow(self) -> list[Sequence]:
        """Give every running sequence a block for its last token; the sequences preempted for it, already removed."""
        preempted = []
        for sequence in self.running:
            while sequence.active and sequence.num_missing_blocks(self._block_tokens) > self._pool.num_free:
                newest = self._active[-1]
                self.remove(newest)
                preempted.append(newest)
            if sequence.active:
                sequence.block_table += self._pool.allocate(sequence.num_missing_blocks(self._block_tokens))
        return preempted

    def remove(self, sequence: Sequence) -> None:
        """End a sequence in whatever state and free its blocks. Ending it twice is no error."""
        if sequence.state is SequenceState.ENDED:
            return
        if sequence.active:
            self._active.remove(sequence)
        else:
            self._waiting.remove(sequence)
        blocks, sequence.block_table = sequence.block_table, []
        sequence.state = SequenceState.ENDED
        self._pool.release(blocks)

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Shared blocks for the published prefix, fresh ones for the rest; False if there are not enough."""
        num_full = sequence.num_tokens // self._block_tokens
        held = self._pool.match(sequence.block_hashes[:num_full])
        missing = num_blocks_for(sequence.num_tokens, self._block_tokens) - len(held)
        if missing + self.num_active > self._pool.num_free:
            self._pool.release(held)
            return False
        sequence.block_table = held + self._pool.allocate(missing)
        sequence.num_held_blocks = len(held)
        return True
