"""One sequence under way: its tokens, the KV blocks that hold them, and where it is in its life.

Owns facts, not decisions: who is admitted or preempted is `policy`'s business, what a token means the engine's.

    WAITING ──admit──▶ READING ──start──▶ RUNNING ──┐
       └───────────────────┴──────────────────┴─────┴──remove──▶ ENDED (holds no block)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from meshfire.kv.hashing import num_blocks_for


class SequenceState(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"  # holds nothing
    READING = "reading"  # holds blocks; its KV is on the way
    RUNNING = "running"  # part of every step
    ENDED = "ended"


@dataclass(eq=False)
class Sequence:
    """Tokens and blocks of one request; compared by identity.

    `token_ids` are prompt and output; the KV of the first `num_computed_tokens` is in the blocks of `block_table`,
    which are passed first to last. `block_hashes` name the blocks of the tokens that it came with, the last of them
    maybe partial.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    block_hashes: tuple[bytes, ...] = ()
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    #: leading blocks of block_table that were found in the pool when it was admitted: nobody needs to fill them
    num_held_blocks: int = 0
    state: SequenceState = SequenceState.WAITING

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, also by earlier workers."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        """The output so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def active(self) -> bool:
        """Whether it holds blocks."""
        return self.state in (SequenceState.READING, SequenceState.RUNNING)

    def append(self, token_id: int) -> None:
        """The next token of the output. Its KV is computed by the step after."""
        self.token_ids.append(token_id)

    def num_missing_blocks(self, block_tokens: int) -> int:
        """Blocks that its tokens need beyond those that it has."""
        return max(0, num_blocks_for(self.num_tokens, block_tokens) - len(self.block_table))
