"""What rank 0 asks of the others: a header of three integers, then the operands.

Owns how a step is laid out as one integer tensor. Nothing is pickled.
"""

from __future__ import annotations

import enum
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from meshfire.model.interface import ForwardBatch, SequenceSlice

HEADER_SIZE = 3


class Command(enum.IntEnum):
    """First number of a header."""

    STOP = 0
    #: second number: integers of the encoded batch that follows
    FORWARD = 1
    #: second and third number: rows and columns of the hidden states that follow
    LOGITS = 2


def header(command: Command, first: int = 0, second: int = 0) -> Tensor:
    """[3] int64."""
    return torch.tensor([command, first, second], dtype=torch.int64)


def encode_batch(batch: ForwardBatch) -> Tensor:
    """One int64 vector: T, S, then ids, positions, slots [T each], then per sequence start, stop, context and table."""
    parts = [torch.tensor([batch.token_ids.shape[0], len(batch.sequences)])]
    parts += [batch.token_ids, batch.positions, batch.slots]
    for one in batch.sequences:
        parts += [torch.tensor([one.start, one.stop, one.context_tokens, one.block_table.shape[0]]), one.block_table]
    return torch.cat(parts)


def decode_batch(encoded: Tensor) -> ForwardBatch:
    """The inverse of `encode_batch`."""
    num_tokens, num_sequences = (int(number) for number in encoded[:2])
    ends = list(accumulate([num_tokens] * 3, initial=2))
    token_ids, positions, slots = (encoded[start:stop] for start, stop in pairwise(ends))
    sequences, at = [], ends[-1]
    for _ in range(num_sequences):
        start, stop, context_tokens, num_blocks = encoded[at : at + 4].tolist()
        sequences.append(SequenceSlice(start, stop, context_tokens, encoded[at + 4 : at + 4 + num_blocks]))
        at += 4 + num_blocks
    return ForwardBatch(token_ids, positions, slots, tuple(sequences))
