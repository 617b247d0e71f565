"""The parts of a step as the model wants them: rows, positions, slots and block tables.

Owns the arithmetic from tokens to slots. Knows nothing of who runs or of the pool: every sequence already has a block
for each of its tokens (`policy.Scheduler.grow`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from meshfire.errors import InternalError
from meshfire.kv.hashing import num_blocks_for
from meshfire.model.interface import ForwardBatch, SequenceSlice
from meshfire.sched.parts import StepPart


def forward_batch(parts: Iterable[StepPart]) -> ForwardBatch:
    """One step: [T] rows, part after part, of sequences with one new token and with many alike.

    Raises InternalError for a part with nothing to compute or without a block for a token.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    slices: list[SequenceSlice] = []
    for part in parts:
        _require_runnable(part)
        sequence, start, stop = part.sequence, len(token_ids), part.start + part.num_rows
        block_tokens = sequence.chain.block_tokens
        if stop - part.start == 1:  # most of them, and many in a step
            token_ids.append(sequence.token_ids[part.start])
            positions.append(part.start)
            slots.append(_slot(sequence.block_table, part.start, block_tokens))
        else:
            token_ids += sequence.token_ids[part.start : part.stop]
            token_ids += part.draft_ids
            positions += range(part.start, stop)
            slots += [_slot(sequence.block_table, position, block_tokens) for position in range(part.start, stop)]
        # A reserved block past the context is not the model's business.
        table = sequence.table(num_blocks_for(stop, block_tokens))
        slices.append(SequenceSlice(start, len(token_ids), stop, table))
    return ForwardBatch(_int64(token_ids), _int64(positions), _int64(slots), tuple(slices))


def _slot(block_table: Sequence[int], position: int, block_tokens: int) -> int:
    block, offset = divmod(position, block_tokens)
    return block_table[block] * block_tokens + offset


def _require_runnable(part: StepPart) -> None:
    if not 0 <= part.start < part.stop <= part.sequence.num_tokens:
        raise InternalError(f"tokens {part.start} to {part.stop} of {part.sequence.num_tokens}: nothing to run")
    if part.draft_ids and not part.is_last:
        raise InternalError("a draft in the middle of a sequence")
    stop = part.start + part.num_rows
    if stop > len(part.sequence.block_table) * part.sequence.chain.block_tokens:
        raise InternalError(f"{len(part.sequence.block_table)} KV blocks do not hold {stop} tokens")


def _int64(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
