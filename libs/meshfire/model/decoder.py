"""A pre-norm decoder put together from parts: the `CausalLM` of every architecture here.

Owns the order of things in a layer and what is checked at the edge of a step. Knows nothing of attention's or the FFN's
insides, requests or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshfire.errors import InvalidPrompt
from meshfire.model.compute.interface import Linear
from meshfire.model.feed_forward import FeedForward
from meshfire.model.interface import ExpertBackend, ExpertLayout, ForwardBatch, KvGeometry, KvView
from meshfire.model.norm import RmsNorm


class Attention(Protocol):
    """First half of a layer."""

    def __call__(self, layer: int, hidden: Tensor, batch: ForwardBatch, kv: KvView) -> Tensor:
        """[T, H] → [T, H]; writes the step's KV rows."""


@dataclass(frozen=True)
class DecoderLayer:
    """h += attention(norm(h)); h += ffn(norm(h))."""

    input_norm: RmsNorm
    attention: Attention
    ffn_norm: RmsNorm
    ffn: FeedForward


@dataclass(eq=False)
class Decoder:
    """`embedding` [V, H] in any float type; `head` projects to V."""

    geometry: KvGeometry
    context_tokens: int
    experts: ExpertLayout
    embedding: Tensor
    layers: Sequence[DecoderLayer]
    norm: RmsNorm
    head: Linear

    def __post_init__(self) -> None:
        self.vocab_size, self.hidden_size = self.embedding.shape

    def forward(self, batch: ForwardBatch, kv: KvView, experts: ExpertBackend) -> Tensor:
        """Run all layers, write this step's KV, return hidden states after the final norm: [T, H] float32.

        Raises InvalidPrompt for ids outside the vocabulary, and whatever the expert backend raises.
        """
        hidden = self.embed(batch.token_ids)
        added = None  # what a half layer adds is added by the norm of the next half
        for index, layer in enumerate(self.layers):
            added = layer.attention(index, layer.input_norm.after_adding(hidden, added), batch, kv)
            added = layer.ffn(index, layer.ffn_norm.after_adding(hidden, added), experts)
        return self.norm.after_adding(hidden, added)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] → [N, V] float32."""
        return self.head(hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] → [T, H] float32. Raises InvalidPrompt for ids outside the vocabulary."""
        self._check(token_ids)
        return self.embedding[token_ids].to(torch.float32)

    def _check(self, token_ids: Tensor) -> None:
        if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self.vocab_size:
            raise InvalidPrompt(f"token ids must be below {self.vocab_size}", field="token_ids")
