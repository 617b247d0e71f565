"""Continuous batching: who is admitted, who gets a block, who must go back when there is none.

Owns the order of sequences and the references that they hold in the block pool; every block that it takes it gives
back in `preempt` or `remove`. Knows nothing of leases, time or tensors. Not thread-safe: it lives on the event loop.

Admission is first come, first served: a large sequence at the head is not overtaken, so it cannot starve. Beside the
blocks of its tokens, one more per active sequence must be free, so that everybody can cross the next block border.
When a running sequence finds no block, the newest active one goes back to the head of the queue, itself included: the
oldest is never sent back, hence always finishes, hence all do (each fits the pool alone, which `add` checks). What a
preempted sequence had computed stays published until its blocks are evicted; the rest it computes anew.
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
        """Sequences that hold blocks."""
        return len(self._active)

    @property
    def num_slots(self) -> int:
        """Sequences that `add` would still take."""
        return self._max_active + self._max_waiting - self.num_active - self.num_waiting

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that are free or evictable and that no waiting sequence needs."""
        return max(0, self._pool.num_free - sum(one.num_missing_blocks() for one in self._waiting))

    @property
    def num_pending_tokens(self) -> int:
        """Tokens of prompts, and of what was preempted, that are still to be computed here."""
        everybody = (*self._waiting, *self._active)
        return sum(one.num_new_tokens for one in everybody if one.num_new_tokens > 1 and not one.kv_comes)

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
        sequence.chain.extend(sequence.token_ids)
        self._waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Give blocks to waiting sequences while slots and blocks allow: WAITING → PREPARING."""
        admitted = []
        while self._waiting and self.num_active < self._max_active and self._take_blocks(self._waiting[0]):
            sequence = self._waiting.popleft()
            sequence.state = SequenceState.PREPARING
            self._active.append(sequence)
            admitted.append(sequence)
        return admitted

    def arrived(self, sequence: Sequence) -> None:
        """The KV of all its tokens is in its blocks: PREPARING → RUNNING. Should it be lost, it is computed here."""
        self._begin(sequence)
        sequence.kv_comes = False
        self.computed(sequence, sequence.num_tokens)

    def compute(self, sequence: Sequence) -> None:
        """It may join the steps, which compute what was not found in the pool: PREPARING → RUNNING."""
        if sequence.kv_comes:
            raise InternalError("a sequence whose KV comes from elsewhere cannot be computed here")
        self._begin(sequence)
        sequence.num_computed_tokens = sequence.num_held_blocks * self._block_tokens

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of its first `num_tokens` is in its blocks: those that they fill may be shared from now on."""
        sequence.num_computed_tokens = num_tokens
        num_full = num_tokens // self._block_tokens
        if num_full > sequence.num_published_blocks:
            sequence.chain.extend(sequence.token_ids)
            for index in range(sequence.num_published_blocks, num_full):
                self._pool.publish(sequence.block_table[index], sequence.chain.hashes[index])
            sequence.num_published_blocks = num_full

    def adopt(self, sequence: Sequence) -> None:
        """Take over what others have published meanwhile of what a running sequence would compute next."""
        while sequence.num_computed_tokens % self._block_tokens == 0:
            index = sequence.num_computed_tokens // self._block_tokens
            if (index + 1) * self._block_tokens > sequence.num_reusable_tokens:
                return
            shared = self._pool.match(sequence.chain.hashes[index : index + 1])
            if not shared:
                return
            self._pool.release([sequence.block_table[index]])
            sequence.block_table[index] = shared[0]
            sequence.blocks_changed()
            sequence.num_published_blocks = index + 1
            sequence.num_computed_tokens += self._block_tokens

    def grow(self) -> list[Sequence]:
        """Give every running sequence blocks for its tokens; the sequences preempted for it, newest first."""
        preempted = []
        for sequence in self.running:
            while sequence.active and sequence.num_missing_blocks() > self._pool.num_free:
                newest = self._active[-1]
                self._preempt(newest)
                preempted.append(newest)
            if sequence.active and (missing := sequence.num_missing_blocks()):
                sequence.block_table += self._pool.allocate(missing)
        return preempted

    def reserve(self, sequence: Sequence, num_more_tokens: int) -> int:
        """Blocks for tokens after its last one, without preempting anybody; for how many of them there is room."""
        spare = max(0, self._pool.num_free - self.num_active)
        missing = min(sequence.num_missing_blocks(num_more_tokens), spare)
        sequence.block_table += self._pool.allocate(missing)
        room = len(sequence.block_table) * self._block_tokens - sequence.num_tokens
        return min(num_more_tokens, room)

    def remove(self, sequence: Sequence) -> None:
        """End a sequence in whatever state and free its blocks. Ending it twice is no error."""
        if sequence.state is SequenceState.ENDED:
            return
        if sequence.active:
            self._active.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._free_blocks(sequence)
        sequence.state = SequenceState.ENDED

    def _preempt(self, sequence: Sequence) -> None:
        """Back to where it came from: before those that were never admitted, which all came later."""
        self._active.remove(sequence)
        self._free_blocks(sequence)
        sequence.chain.extend(sequence.token_ids)
        sequence.state = SequenceState.WAITING
        self._waiting.appendleft(sequence)

    def _begin(self, sequence: Sequence) -> None:
        if sequence.state is not SequenceState.PREPARING:
            raise InternalError(f"a sequence cannot run: it is {sequence.state.value}")
        sequence.state = SequenceState.RUNNING

    def _free_blocks(self, sequence: Sequence) -> None:
        blocks, sequence.block_table = sequence.block_table, []
        sequence.blocks_changed()
        sequence.num_computed_tokens = sequence.num_held_blocks = sequence.num_published_blocks = 0
        self._pool.release(blocks)

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Shared blocks for the published prefix, fresh ones for the rest; False if there are not enough."""
        num_reusable = sequence.num_reusable_tokens // self._block_tokens
        held = self._pool.match(sequence.chain.hashes[:num_reusable])
        missing = num_blocks_for(sequence.num_tokens, self._block_tokens) - len(held)
        if missing + self.num_active > self._pool.num_free:
            self._pool.release(held)
            return False
        sequence.block_table = held + self._pool.allocate(missing)
        sequence.num_held_blocks = sequence.num_published_blocks = len(held)
        return True
