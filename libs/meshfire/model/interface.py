"""What engines and models agree on: the batch, the KV they read and write, and where experts are computed.

Owns no arithmetic. A model knows nothing of requests, sampling or transport; an engine knows nothing of layers.
Shapes use the legend of docs/glossary.md: T tokens of a step, H hidden, K experts per token, V vocabulary,
P tokens per block, W numbers per token and layer in the KV cache, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class KvGeometry:
    """What one token's KV looks like; two workers exchange KV only if theirs are equal."""

    num_layers: int
    block_tokens: int
    row_width: int
    dtype: torch.dtype = torch.float32

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.num_layers * self.row_width * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.token_bytes * self.block_tokens


@dataclass(frozen=True)
class SequenceSlice:
    """The rows of a step that belong to one sequence: consecutive positions of it, in order.

    `start:stop` are rows of the batch; the last row has position `context_tokens - 1`, so the first has
    `context_tokens - (stop - start)`. `block_table` [ceil(context_tokens / P)] int64 covers all of the context.
    """

    start: int
    stop: int
    context_tokens: int
    block_table: Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """One step. `token_ids`, `positions`, `slots` are [T] int64; slot = block x P + offset, where a token's KV goes."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sequences: Sequence[SequenceSlice]


class KvView(Protocol):
    """The paged cache as a model sees it."""

    geometry: KvGeometry

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Store `rows` [T, W] of one layer at `slots` [T]."""

    def read(self, layer: int, block_table: Tensor, num_tokens: int) -> Tensor:
        """The first `num_tokens` rows of a sequence: [num_tokens, W]."""


class PendingExperts(Protocol):
    """A dispatch under way."""

    def result(self) -> Tensor:
        """Wait for the sum over the chosen experts: [T, H] float32. Raises ShardUnavailable, DeadlineExceeded."""


class ExpertBackend(Protocol):
    """Where FFNs of (layer, expert) pairs are computed: in this process or on expert shards."""

    def dispatch(self, layer: int, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> PendingExperts:
        """Start the experts of one layer. `hidden` [T, H], `topk_ids` [T, K] int32, `topk_weights` [T, K] float32."""


@dataclass(frozen=True)
class ExpertLayout:
    """Which (layer, expert) pairs a model has: what a placement must cover."""

    #: logical experts of each decoder layer; 0 = the layer has none (its FFN stays with attention)
    num_experts: tuple[int, ...]
    hidden_size: int


class CausalLM(Protocol):
    """A decoder: embedding, attention, gates, shared experts, head. Routed experts and FFN slices are the backend's."""

    geometry: KvGeometry
    hidden_size: int
    vocab_size: int
    context_tokens: int
    experts: ExpertLayout

    def forward(self, batch: ForwardBatch, kv: KvView, experts: ExpertBackend) -> Tensor:
        """Run all layers, write this step's KV, return hidden states after the final norm: [T, H] float32."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Head: [N, H] → [N, V] float32."""
