"""Running sequences as one step of the model: rows, positions, slots and block tables.

Owns the arithmetic from tokens to slots. Knows nothing of who runs or of the pool: every sequence already has a block
for each of its tokens (`policy.Scheduler.grow`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from meshfire.errors import InternalError
from meshfire.kv.hashing import num_blocks_for
from meshfire.model.interface import ForwardBatch, SequenceSlice
from meshfire.sched.sequence import Sequence as Running


def forward_batch(sequences: Sequence[Running], block_tokens: int) -> ForwardBatch:
    """One step over every token whose KV is not computed yet: [T] rows, sequence after sequence.

    Raises InternalError for a sequence with nothing to compute or without a block for a token.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    slices: list[SequenceSlice] = []
    for one in sequences:
        _require_runnable(one, block_tokens)
        start = len(token_ids)
        new = range(one.num_computed_tokens, one.num_tokens)
        token_ids += one.token_ids[new.start :]
        positions += new
        slots += _slots(one.block_table, new, block_tokens)
        slices.append(SequenceSlice(start, len(token_ids), one.num_tokens, _block_table(one, block_tokens)))
    return ForwardBatch(_int64(token_ids), _int64(positions), _int64(slots), tuple(slices))


def _slots(block_table: Sequence[int], positions: Iterable[int], block_tokens: int) -> list[int]:
    return [block_table[position // block_tokens] * block_tokens + position % block_tokens for position in positions]


def _block_table(sequence: Running, block_tokens: int) -> torch.Tensor:
    """[ceil(context / P)]: a reserved block past the context is not the model's business."""
    return _int64(sequence.block_table[: num_blocks_for(sequence.num_tokens, block_tokens)])


def _require_runnable(sequence: Running, block_tokens: int) -> None:
    if sequence.num_computed_tokens >= sequence.num_tokens:
        raise InternalError(f"all {sequence.num_tokens} tokens of a sequence are computed: nothing to run")
    if sequence.num_missing_blocks(block_tokens):
        raise InternalError(f"{len(sequence.block_table)} KV blocks do not hold {sequence.num_tokens} tokens")


def _int64(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
