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
        start, new = len(token_ids), range(part.start, part.start + part.num_rows)
        token_ids += part.sequence.token_ids[part.start : part.stop]
        token_ids += part.draft_ids
        positions += new
        slots += _slots(part.sequence.block_table, new, part.sequence.chain.block_tokens)
        slices.append(SequenceSlice(start, len(token_ids), new.stop, _block_table(part, new.stop)))
    return ForwardBatch(_int64(token_ids), _int64(positions), _int64(slots), tuple(slices))


def _slots(block_table: Sequence[int], positions: Iterable[int], block_tokens: int) -> list[int]:
    return [block_table[position // block_tokens] * block_tokens + position % block_tokens for position in positions]


def _block_table(part: StepPart, context_tokens: int) -> torch.Tensor:
    """[ceil(context / P)]: a reserved block past the context is not the model's business."""
    return _int64(part.sequence.block_table[: num_blocks_for(context_tokens, part.sequence.chain.block_tokens)])


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
