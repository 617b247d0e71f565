"""A model in one process, without a mesh: the oracle of the mesh's tests and the baseline of its benchmarks.

Owns a KV store big enough for its batch. Knows nothing of requests: greedy, all sequences in step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshfire.kv.store import KvStore
from meshfire.model import registry
from meshfire.model.experts import LocalExperts
from meshfire.model.interface import ForwardBatch, SequenceSlice


class InProcessModel:
    """Loads a model directory with all its experts. Raises CheckpointError."""

    def __init__(
        self,
        directory: Path,
        *,
        dense_slices: int = 0,
        max_batch: int = 8,
        max_tokens: int = 2048,
        compute: str = "auto",
    ) -> None:
        self.model = registry.load(directory, dense_slices=dense_slices, compute=compute)
        self._experts = LocalExperts(registry.open_experts(directory, dense_slices=dense_slices, compute=compute))
        self._block_tokens = self.model.geometry.block_tokens
        self._blocks_each = -(-max_tokens // self._block_tokens)
        self._store = KvStore(self.model.geometry, max_batch * self._blocks_each)

    @torch.no_grad()
    def logits(self, prompts: Sequence[Sequence[int]], num_steps: int) -> Iterator[Tensor]:
        """Logits [B, V] of the token after each prompt, then of `num_steps - 1` greedy steps."""
        lengths = [0] * len(prompts)
        new = [list(prompt) for prompt in prompts]
        for _ in range(num_steps):
            step = self._step(new, lengths)
            lengths = [length + len(tokens) for length, tokens in zip(lengths, new)]
            yield step
            new = [[int(token)] for token in step.argmax(-1)]

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """`num_tokens` tokens after each prompt, end tokens ignored."""
        steps = [step.argmax(-1).tolist() for step in self.logits(prompts, num_tokens)]
        return [list(column) for column in zip(*steps)]

    def _step(self, new: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
        batch = self._batch(new, lengths)
        hidden = self.model.forward(batch, self._store, self._experts)
        last = torch.tensor([one.stop - 1 for one in batch.sequences])
        return self.model.logits(hidden[last])

    def _batch(self, new: Sequence[Sequence[int]], lengths: Sequence[int]) -> ForwardBatch:
        """Sequence i owns blocks [i x blocks_each, (i + 1) x blocks_each)."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        slices: list[SequenceSlice] = []
        for index, (added, length) in enumerate(zip(new, lengths)):
            start, first_slot = len(tokens), index * self._blocks_each * self._block_tokens
            context = length + len(added)
            assert context <= self._blocks_each * self._block_tokens, "max_tokens is too small"
            tokens += added
            positions += range(length, context)
            slots += range(first_slot + length, first_slot + context)
            first_block = index * self._blocks_each
            table = torch.arange(first_block, first_block + -(-context // self._block_tokens))
            slices.append(SequenceSlice(start, len(tokens), context, table))
        return ForwardBatch(_int64(tokens), _int64(positions), _int64(slots), slices)


def _int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
