"""One prompt as steps of the model: which tokens, positions and slots each chunk has. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from meshfire.model.interface import ForwardBatch, SequenceSlice


@dataclass(frozen=True)
class Chunk:
    """Tokens `start … stop - 1` of a prompt."""

    index: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return self.stop - self.start


def chunks_of(start: int, stop: int, chunk_tokens: int) -> Iterator[Chunk]:
    """Cut `start … stop - 1` into chunks of at most `chunk_tokens`."""
    for index, first in enumerate(range(start, stop, chunk_tokens)):
        yield Chunk(index, first, min(first + chunk_tokens, stop))


def batch_of(chunk: Chunk, token_ids: Sequence[int], blocks: Sequence[int], block_tokens: int) -> ForwardBatch:
    """The step that computes `chunk` of `token_ids`, whose KV lies in `blocks`."""
    positions = torch.arange(chunk.start, chunk.stop)
    table = torch.tensor(blocks[: -(-chunk.stop // block_tokens)], dtype=torch.int64)
    return ForwardBatch(
        token_ids=torch.tensor(token_ids[chunk.start : chunk.stop], dtype=torch.int64),
        positions=positions,
        slots=table[positions // block_tokens] * block_tokens + positions % block_tokens,
        sequences=(SequenceSlice(0, chunk.num_tokens, chunk.stop, table),),
    )
