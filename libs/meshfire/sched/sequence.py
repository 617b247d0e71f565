"""One sequence under way: its tokens, the KV blocks that hold them, and where it is in its life.

Owns facts, not decisions: who is admitted or preempted is `policy`'s business, what a token means the engine's.

    WAITING ──admit──▶ PREPARING ──arrived | compute──▶ RUNNING ──┐
       ▲ │                 │                               │      ├──remove──▶ ENDED (holds no block)
       │ └─────────────────┼───────────────────────────────┼──────┘
       └─────────────────preempt───────────────────────────┘
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

from meshfire.kv.hashing import HashChain, num_blocks_for


class SequenceState(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"  # holds nothing
    PREPARING = "preparing"  # holds blocks; its KV is on the way, or something else is
    RUNNING = "running"  # part of the steps
    ENDED = "ended"


@dataclass(eq=False)
class Sequence:
    """Tokens and blocks of one request; compared by identity.

    `token_ids` are prompt and output; the KV of the first `num_computed_tokens` is in the blocks of `block_table`,
    which are passed first to last. `chain` names its full blocks.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    chain: HashChain
    #: the KV of all its tokens comes from elsewhere, with the last one's hidden state; else it is computed here
    kv_comes: bool = False
    #: hidden states from this token on are wanted, which no cached KV can replace; None = only the last one's
    wanted_from: int | None = None
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    #: leading blocks of block_table that were found in the pool when it was admitted: nobody needs to fill them
    num_held_blocks: int = 0
    #: leading blocks of block_table that were offered to the pool under their names
    num_published_blocks: int = 0
    state: SequenceState = SequenceState.WAITING
    #: block_table as a tensor, made when a step needs it
    _table: torch.Tensor | None = field(default=None, repr=False)

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
    def num_new_tokens(self) -> int:
        """Tokens whose KV is not computed yet; 1 for a sequence in the middle of its output."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def active(self) -> bool:
        """Whether it holds blocks."""
        return self.state in (SequenceState.PREPARING, SequenceState.RUNNING)

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens whose KV may be another sequence's: what is left gives the hidden states that are wanted."""
        if self.kv_comes:
            return self.num_tokens
        last = self.num_tokens - 1
        return last if self.wanted_from is None else min(last, self.wanted_from)

    def blocks_changed(self) -> None:
        """Call after a block of block_table was replaced; one that was added is seen."""
        self._table = None

    def table(self, num_blocks: int) -> torch.Tensor:
        """The first `num_blocks` of block_table: [num_blocks] int64. Made anew only when blocks came or went."""
        if self._table is None or len(self._table) != len(self.block_table):
            self._table = torch.tensor(self.block_table, dtype=torch.int64)
        return self._table[:num_blocks]

    def append(self, token_id: int) -> None:
        """The next token of the output. Its KV is computed by the step after."""
        self.token_ids.append(token_id)

    def num_missing_blocks(self, num_more_tokens: int = 0) -> int:
        """Blocks that its tokens, and so many after them, need beyond those that it has."""
        needed = num_blocks_for(self.num_tokens + num_more_tokens, self.chain.block_tokens)
        return max(0, needed - len(self.block_table))
