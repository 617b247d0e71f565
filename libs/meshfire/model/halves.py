"""A step as two halves: while one half's experts are under way, the other half's attention is computed.

Owns the cut and the order of the halves' work. The second half sees the KV that the first has written for the same
layer, so a sequence may be cut as well. Rows do not depend on each other (ADR 9): the bits are those of the whole step.
Pays where experts are elsewhere and a half costs half: many rows. With few, both halves read most of the weights again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshfire.model.decoder import Decoder, DecoderLayer
from meshfire.model.interface import CausalLM, ExpertBackend, ForwardBatch, KvView, SequenceSlice
from meshfire.model.norm import RmsNorm


def overlapped(model: CausalLM, overlap_from: int) -> CausalLM:
    """`model`, running steps of `overlap_from` rows or more in halves; 0 = as it is. Raises TypeError if no Decoder."""
    if not overlap_from:
        return model
    if not isinstance(model, Decoder):
        raise TypeError(f"only a Decoder runs in halves, not {type(model).__name__}")
    return Overlapped(model, max(2, overlap_from))


@dataclass(eq=False)
class Overlapped:
    """A `CausalLM` around a decoder."""

    decoder: Decoder
    #: rows of a step from which it is cut
    overlap_from: int

    def __post_init__(self) -> None:
        self.geometry = self.decoder.geometry
        self.hidden_size = self.decoder.hidden_size
        self.vocab_size = self.decoder.vocab_size
        self.context_tokens = self.decoder.context_tokens
        self.experts = self.decoder.experts

    def forward(self, batch: ForwardBatch, kv: KvView, experts: ExpertBackend) -> Tensor:
        """As `CausalLM.forward`."""
        num_rows = len(batch.token_ids)
        if num_rows < self.overlap_from:
            return self.decoder.forward(batch, kv, experts)
        hidden = self.decoder.embed(batch.token_ids)
        middle = num_rows // 2
        halves = [
            _Half(_rows_of(batch, start, stop, kv.geometry.block_tokens), hidden[start:stop])
            for start, stop in ((0, middle), (middle, num_rows))
        ]
        for index, layer in enumerate(self.decoder.layers):
            for half in halves:
                half.begin(index, layer, kv, experts)
        return torch.cat([half.end(self.decoder.norm) for half in halves])

    def logits(self, hidden: Tensor) -> Tensor:
        """As `CausalLM.logits`."""
        return self.decoder.logits(hidden)


@dataclass(eq=False)
class _Half:
    batch: ForwardBatch
    #: changed in place
    hidden: Tensor
    #: the FFN that was begun last: its result is still to be added to `hidden`
    ffn: Callable[[], Tensor] | None = None

    def begin(self, index: int, layer: DecoderLayer, kv: KvView, experts: ExpertBackend) -> None:
        """Finish the layer before, run this one's attention, start its FFN."""
        attended = layer.attention(index, self.end(layer.input_norm), self.batch, kv)
        self.ffn = layer.ffn.begin(index, layer.ffn_norm.after_adding(self.hidden, attended), experts)

    def end(self, norm: RmsNorm) -> Tensor:
        """The norm of the hidden states after what was begun."""
        return norm.after_adding(self.hidden, self.ffn() if self.ffn is not None else None)


def _rows_of(batch: ForwardBatch, start: int, stop: int, block_tokens: int) -> ForwardBatch:
    """Rows `start:stop` as a batch of their own."""
    parts = [
        _part_of(one, start, stop, block_tokens) for one in batch.sequences if one.start < stop and start < one.stop
    ]
    return ForwardBatch(batch.token_ids[start:stop], batch.positions[start:stop], batch.slots[start:stop], parts)


def _part_of(one: SequenceSlice, start: int, stop: int, block_tokens: int) -> SequenceSlice:
    first, last = max(one.start, start), min(one.stop, stop)
    context_tokens = one.context_tokens - (one.stop - last)
    table = one.block_table[: -(-context_tokens // block_tokens)]
    return replace(one, start=first - start, stop=last - start, context_tokens=context_tokens, block_table=table)
