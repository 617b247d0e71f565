"""What each sequence computes in the next step: pure decisions over the running sequences.

Owns the pace: every sequence in the middle of its output gets its one token, and beside them at most a budget of tokens
goes to sequences that still compute their prompt (or, after a preemption, what they had), oldest first. Of sequences
that begin alike only the oldest computes; the others wait and take its blocks over.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshfire.sched.policy import Scheduler
from meshfire.sched.sequence import Sequence


@dataclass(frozen=True)
class StepPart:
    """Tokens `start … stop - 1` of a sequence, none for one whose hidden state came from elsewhere; then guesses of
    what may follow its last token."""

    sequence: Sequence
    start: int
    stop: int
    draft_ids: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Tokens that the model computes."""
        return self.stop - self.start + len(self.draft_ids)

    @property
    def is_last(self) -> bool:
        """Whether the sequence's next token can be chosen after it."""
        return self.stop == self.sequence.num_tokens


@dataclass(frozen=True)
class ChunkBudget:
    """Tokens per step of sequences that compute their prompt."""

    #: while others are in the middle of their output, which the step holds up
    beside_others: int
    #: while nobody is
    alone: int


def next_parts(scheduler: Scheduler, budget: ChunkBudget) -> list[StepPart]:
    """The next step, in order of admission; empty only if nobody runs. Call after `Scheduler.grow`."""
    running = scheduler.running
    left = budget.beside_others if any(one.num_new_tokens <= 1 for one in running) else budget.alone
    claimed: set[bytes] = set()
    parts = []
    for sequence in running:
        if sequence.num_new_tokens > 1:
            scheduler.adopt(sequence)
        if sequence.num_new_tokens <= 1:
            parts.append(StepPart(sequence, sequence.num_computed_tokens, sequence.num_tokens))
        elif left > 0 and not _follows(sequence, claimed):
            num_tokens = min(left, sequence.num_new_tokens)
            left -= num_tokens
            start = sequence.num_computed_tokens
            parts.append(StepPart(sequence, start, start + num_tokens))
            claimed.update(sequence.chain.hashes[start // sequence.chain.block_tokens :])
    return parts


def _follows(sequence: Sequence, claimed: set[bytes]) -> bool:
    """Whether an older sequence is computing the block that it needs next."""
    index, offset = divmod(sequence.num_computed_tokens, sequence.chain.block_tokens)
    if offset or (index + 1) * sequence.chain.block_tokens > sequence.num_reusable_tokens:
        return False
    return sequence.chain.hashes[index] in claimed
