"""Run our model alone: a dense KV store, experts in process, one sequence or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshfire.model import registry
from meshfire.model.experts import LocalExperts
from meshfire.model.interface import CausalLM, ForwardBatch, KvGeometry, SequenceSlice


class DenseKv:
    """The plainest KvView: one row per slot."""

    def __init__(self, geometry: KvGeometry, num_blocks: int) -> None:
        self.geometry = geometry
        self.rows = torch.full((geometry.num_layers, num_blocks * geometry.block_tokens, geometry.row_width), torch.nan)

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        self.rows[layer, slots] = rows

    def read(self, layer: int, block_table: Tensor, num_tokens: int) -> Tensor:
        size = self.geometry.block_tokens
        slots = (block_table[:, None] * size + torch.arange(size)).flatten()
        return self.rows[layer, slots[:num_tokens]]


@dataclass
class Runner:
    """A model with its experts and cache. `tables` gives each sequence its blocks."""

    model: CausalLM
    experts: LocalExperts
    kv: DenseKv
    tables: dict[int, Tensor]

    @classmethod
    def open(cls, directory: Path, *, dense_slices: int = 0, num_sequences: int = 1, compute: str = "auto") -> Runner:
        model = registry.load(directory, dense_slices=dense_slices, compute=compute)
        experts = LocalExperts(registry.open_experts(directory, dense_slices=dense_slices, compute=compute))
        num_blocks = -(-model.context_tokens // model.geometry.block_tokens)
        order = torch.randperm(num_blocks * num_sequences, generator=torch.Generator().manual_seed(5))
        tables = dict(enumerate(order.view(num_sequences, num_blocks)))
        return cls(model, experts, DenseKv(model.geometry, num_blocks * num_sequences), tables)

    def step(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> Tensor:
        """Parts are (sequence, first position, token ids); hidden states of all rows: [T, H]."""
        size, start, slices, slots, positions = self.model.geometry.block_tokens, 0, [], [], []
        for sequence, first, ids in parts:
            where = torch.arange(first, first + len(ids))
            positions.append(where)
            slots.append(self.tables[sequence][where // size] * size + where % size)
            table = self.tables[sequence][: -(-(first + len(ids)) // size)]
            slices.append(SequenceSlice(start, start + len(ids), first + len(ids), table))
            start += len(ids)
        token_ids = torch.tensor([token for _, _, ids in parts for token in ids])
        batch = ForwardBatch(token_ids, torch.cat(positions), torch.cat(slots), slices)
        return self.model.forward(batch, self.kv, self.experts)

    def prefill(self, ids: Sequence[int], chunk: int, sequence: int = 0) -> Tensor:
        """Logits of every position of one sequence, in chunks: [T, V]."""
        hidden = [self.step([(sequence, at, ids[at : at + chunk])]) for at in range(0, len(ids), chunk)]
        return self.model.logits(torch.cat(hidden))

    def decode(self, prompt: Sequence[int], tokens: Sequence[int], sequence: int = 0) -> Tensor:
        """Logits that choose each of `tokens`, fed one by one after the prompt: [N, V]."""
        rows = [self.prefill(prompt, len(prompt), sequence)[-1:]]
        for index, token in enumerate(tokens[:-1]):
            rows.append(self.model.logits(self.step([(sequence, len(prompt) + index, [token])])))
        return torch.cat(rows)
