"""Grouped-query attention (Llama): projections, rotation, and the KV row it caches.

Owns the row: all rotated key heads, then all value heads. Knows nothing of pages beyond `KvView`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshfire.model.attention import ATTENTION_DTYPE, attend
from meshfire.model.compute.interface import Linear
from meshfire.model.interface import ForwardBatch, KvView
from meshfire.model.partition import Partition
from meshfire.model.rope import Rope


@dataclass(frozen=True)
class GqaShape:
    """Heads of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def share(self, partition: Partition) -> GqaShape:
        """The heads of one rank. Raises CheckpointError if they do not divide evenly."""
        keys = partition.share(self.num_kv_heads, "num_key_value_heads")
        return replace(self, num_heads=self.num_heads // partition.size, num_kv_heads=keys.stop - keys.start)

    @property
    def row_width(self) -> int:
        """Numbers per token in the KV cache."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class GroupedQueryAttention:
    """`qkv` projects to query heads, then key heads, then value heads; `out` back to H.

    A token sees the last `window_tokens` tokens, itself included; 0 = all.
    """

    shape: GqaShape
    qkv: Linear
    out: Linear
    rope: Rope
    window_tokens: int = 0

    def __call__(self, layer: int, hidden: Tensor, batch: ForwardBatch, kv: KvView) -> Tensor:
        """[T, H] → [T, H]; writes this step's KV first, so that a token sees itself."""
        shape = self.shape
        num_keys = shape.num_kv_heads
        heads = self.qkv(hidden).view(hidden.shape[0], -1, shape.head_dim)
        rotated = self.rope.rotate(heads[:, : shape.num_heads + num_keys], self.rope.angles(batch.positions))
        queries, keys = rotated[:, : shape.num_heads], rotated[:, shape.num_heads :]
        kv.write(layer, batch.slots, torch.cat((keys, heads[:, -num_keys:]), dim=1).flatten(1))
        return self.out(self._attend(layer, queries.to(ATTENTION_DTYPE), batch, kv).to(torch.float32))

    def _attend(self, layer: int, queries: Tensor, batch: ForwardBatch, kv: KvView) -> Tensor:
        """[T, N, D] → [T, N·D], sequence by sequence."""
        shape = self.shape
        output = torch.empty_like(queries)
        for part in batch.sequences:
            rows = kv.read(layer, part.block_table, part.context_tokens).to(ATTENTION_DTYPE)
            keys, values = rows.view(part.context_tokens, 2, shape.num_kv_heads, shape.head_dim).unbind(1)
            mine = queries[part.start : part.stop]
            output[part.start : part.stop] = attend(mine, keys, values, shape.head_dim**-0.5, self.window_tokens)
        return output.flatten(1)
