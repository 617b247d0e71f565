"""A decoder's tensors by the name they have inside the decoder, whatever the checkpoint puts in front.

Owns the spellings in use: `model.` (plain and Hugging Face), `language_model.model.` (Kimi K2.5's release),
`model.language_model.` (Hugging Face's Kimi class), `language_model.` (some re-quantizations), and `blocks` for
`layers` (Hugging Face's Kimi class on saving). Knows nothing of what the tensors are for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from meshfire.errors import CheckpointError
from meshfire.model.checkpoint import Checkpoint, as_float32
from meshfire.model.compute.interface import Compute, Ffn, Linear
from meshfire.model.compute.partitioned import GatheredLinear, PartitionedFfn, ScatteredLinear
from meshfire.model.matrices import read_matrix
from meshfire.model.partition import WHOLE, Partition
from meshfire.model.stored import PlainWeight, StoredFfn, StoredWeight

_PREFIXES = ("language_model.model.", "model.language_model.", "model.", "language_model.", "")
_ALL = slice(None)
_HEADS = ("language_model.lm_head.weight", "lm_head.weight", "model.lm_head.weight")


@dataclass(frozen=True)
class DecoderTensors:
    """Tensors of one decoder. `prefix` stands before `embed_tokens`, `layers` names the list of layers."""

    checkpoint: Checkpoint
    prefix: str
    layers: str
    compute: Compute
    partition: Partition = WHOLE

    @classmethod
    def find(cls, checkpoint: Checkpoint, compute: Compute, partition: Partition = WHOLE) -> DecoderTensors:
        """Recognise the checkpoint's spelling. Raises CheckpointError if it has no embedding under any."""
        for prefix in _PREFIXES:
            if f"{prefix}embed_tokens.weight" in checkpoint:
                old = any(name.startswith(f"{prefix}blocks.0.") for name in checkpoint)
                return cls(checkpoint, prefix, "blocks" if old else "layers", compute, partition)
        raise CheckpointError(
            f"tensor embed_tokens.weight is missing from {checkpoint.directory}", field="embed_tokens.weight"
        )

    def layer(self, index: int) -> LayerTensors:
        """The tensors of one layer."""
        return LayerTensors(self.checkpoint, f"{self.prefix}{self.layers}.{index}.", self.compute, self.partition)

    def embedding(self, vocab_size: int, hidden_size: int) -> Tensor:
        """[V, H] in its stored type, mapped: rows are read when a token needs them."""
        return self.checkpoint.read(f"{self.prefix}embed_tokens.weight", (vocab_size, hidden_size))

    def norm(self, hidden_size: int) -> Tensor:
        """Weight of the final norm: [H] float32."""
        return as_float32(self.checkpoint.read(f"{self.prefix}norm.weight", (hidden_size,)))

    def head(self, vocab_size: int, hidden_size: int, *, tied: bool) -> Linear:
        """The output projection; the embedding itself if `tied`."""
        name = next((name for name in _HEADS if name in self.checkpoint), "lm_head.weight")
        part = self.partition.share(vocab_size, "vocab_size")
        if tied:
            name = f"{self.prefix}embed_tokens.weight"
        matrix = name.removesuffix(".weight")
        share = self.compute.linear(read_matrix(self.checkpoint, matrix, (vocab_size, hidden_size), part))
        return share if self.partition.size == 1 else GatheredLinear(share, self.partition.gather)


@dataclass(frozen=True)
class LayerTensors:
    """Tensors under one prefix, how they are packed, and which share of them this rank has."""

    checkpoint: Checkpoint
    prefix: str
    compute: Compute
    partition: Partition = WHOLE

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.checkpoint

    def stored(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] = ()) -> Tensor:
        """A tensor, or a part of it, in its stored type. Errors as `Checkpoint.read`."""
        return self.checkpoint.read(self.prefix + name, shape, part)

    def vector(self, name: str, size: int) -> Tensor:
        """[size] float32."""
        return as_float32(self.stored(name, (size,)))

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        """[rows, columns] float32, whatever the format."""
        return self.weight(name, (rows, columns)).dequantized()

    def linear(self, columns: int, rows: dict[str, int], *, bias: bool = False, shared: Collection[str] = ()) -> Linear:
        """The named projections of one input, stacked into a single product in the given order.

        Of those in `shared` only this rank's rows, which the product leaves ungathered.
        """
        part = {name: self.partition.share(size, name) if name in shared else _ALL for name, size in rows.items()}
        weights = [self.weight(name, (size, columns), part[name]) for name, size in rows.items()]
        values = torch.cat([weight.dequantized() for weight in weights]) if len(weights) > 1 else None
        biases = [self.vector(f"{name}.bias", size)[part[name]] for name, size in rows.items() if bias]
        stored = weights[0] if values is None else PlainWeight(values)
        return self.compute.linear(stored, torch.cat(biases) if bias else None)

    def weight(self, name: str, shape: tuple[int, int], rows: slice = _ALL, columns: slice = _ALL) -> StoredWeight:
        """The matrix `name`, or a part of it, as it is stored. Errors as `read_matrix`."""
        return read_matrix(self.checkpoint, self.prefix + name, shape, rows, columns)

    def output(self, name: str, rows: int, columns: int, *, bias: bool = False) -> Linear:
        """The projection `name` [rows, columns] after a rank's heads: from its share of the inputs to all outputs."""
        if self.partition.size == 1:
            return self.linear(columns, {name: rows}, bias=bias)
        share = self.linear(columns, {name: rows}, bias=bias, shared=[name])
        return ScatteredLinear(share, self.partition.gather)

    def packed_ffn(self, name: str, hidden_size: int, inner_size: int) -> Ffn:
        """`name`.{gate,up,down}_proj as one FFN; each rank has a share of its neurons and of its outputs."""
        partition = self.partition
        if partition.size == 1:
            return self.compute.ffn(self.ffn(name, hidden_size, inner_size))
        mine = self.ffn(name, hidden_size, inner_size, partition.share(inner_size, f"{name} neurons"))
        rows = partition.share(hidden_size, "hidden_size")
        down = self.weight(f"{name}.down_proj", (hidden_size, inner_size), rows)
        outer = ScatteredLinear(self.compute.linear(down), partition.gather)
        return PartitionedFfn(self.compute.gated(mine.gate, mine.up), outer)

    def ffn(self, name: str, hidden_size: int, inner_size: int, inner: slice = _ALL) -> StoredFfn:
        """`name`.{gate,up,down}_proj, or only its neurons `inner` of `inner_size`."""
        wide, tall = (inner_size, hidden_size), (hidden_size, inner_size)
        return StoredFfn(
            self.weight(f"{name}.gate_proj", wide, inner),
            self.weight(f"{name}.up_proj", wide, inner),
            self.weight(f"{name}.down_proj", tall, columns=inner),
        )
