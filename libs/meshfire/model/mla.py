"""Multi-head latent attention (DeepSeek-V3, Kimi K2.5) in its two equal forms.

Owns the KV row: the normalised latent, then the rotated key that all heads share. Expanded form: keys and values of
every head are rebuilt from the latents; cheaper when many new tokens look at a context. Absorbed form: queries are
taken into the latent space instead, so the cache is read as it is; cheaper for few new tokens. Source: DeepSeek-V2,
arXiv 2405.04434 §2.1. Knows nothing of pages beyond `KvView`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshfire.model.attention import ATTENTION_DTYPE, attend
from meshfire.model.compute.interface import Linear
from meshfire.model.interface import ForwardBatch, KvView, SequenceSlice
from meshfire.model.norm import RmsNorm
from meshfire.model.partition import Partition
from meshfire.model.rope import Rope


@dataclass(frozen=True)
class MlaShape:
    """Sizes of one layer's heads (per head: `nope`, `rope`, `value`) and of the shared latent."""

    num_heads: int
    nope: int
    rope: int
    value: int
    latent: int

    def share(self, partition: Partition) -> MlaShape:
        """The heads of one rank. Raises CheckpointError if they do not divide evenly."""
        heads = partition.share(self.num_heads, "num_attention_heads")
        return replace(self, num_heads=heads.stop - heads.start)

    @property
    def row_width(self) -> int:
        """Numbers per token in the KV cache."""
        return self.latent + self.rope

    @property
    def absorbed_max_tokens(self) -> int:
        """New tokens up to which the absorbed form needs fewer multiplications, for a long context.

        Per head and context token: expansion costs latent x (nope + value) once, a query nope + rope + value;
        absorbed, a query costs 2 x latent + rope. For K2.5's sizes the forms meet at 170 tokens.
        """
        saved = 2 * self.latent - self.nope - self.value
        return max(1, self.latent * (self.nope + self.value) // saved) if saved > 0 else 1


@dataclass(frozen=True)
class Absorption:
    """`kv_b_proj` cut per head, in attention precision: keys [N, nope, latent], values [N, latent, value]."""

    keys: Tensor
    values: Tensor

    @classmethod
    def cut(cls, kv_b: Tensor, shape: MlaShape) -> Absorption:
        """From `kv_b_proj.weight` [N x (nope + value), latent]."""
        per_head = kv_b.to(ATTENTION_DTYPE).view(shape.num_heads, shape.nope + shape.value, shape.latent)
        return cls(per_head[:, : shape.nope].contiguous(), per_head[:, shape.nope :].transpose(1, 2).contiguous())


@dataclass(frozen=True)
class QueryProjection:
    """Hidden → per-head queries, through a normalised latent if `norm` is given. `down` also yields the KV latent."""

    down: Linear
    norm: RmsNorm | None
    up: Linear | None


@dataclass(frozen=True)
class LatentAttention:
    """`scale` multiplies the logits. `absorbed_max_tokens`: a sequence with more new tokens uses the expanded form."""

    shape: MlaShape
    query: QueryProjection
    latent_norm: RmsNorm
    absorption: Absorption
    out: Linear
    rope: Rope
    scale: float
    absorbed_max_tokens: int

    def __call__(self, layer: int, hidden: Tensor, batch: ForwardBatch, kv: KvView) -> Tensor:
        """[T, H] → [T, H]; writes this step's KV first, so that a token sees itself."""
        shape = self.shape
        queries, latent, shared_key = self._project(hidden)
        angles = self.rope.angles(batch.positions)
        shared_key = self.rope.rotate(shared_key[:, None], angles)[:, 0]
        kv.write(layer, batch.slots, torch.cat((latent, shared_key), dim=-1))
        nope, rope = torch.split(queries, [shape.nope, shape.rope], dim=-1)
        queries = torch.cat((nope, self.rope.rotate(rope, angles)), dim=-1).to(ATTENTION_DTYPE)
        return self.out(self._attend(layer, queries, batch, kv).to(torch.float32))

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, N, nope + rope], normalised latent [T, latent], shared key [T, rope]."""
        shape = self.shape
        down = self.query.down(hidden)
        sizes = [down.shape[1] - shape.row_width, shape.latent, shape.rope]
        queries, latent, shared_key = torch.split(down, sizes, dim=-1)
        if self.query.up is not None and self.query.norm is not None:
            queries = self.query.up(self.query.norm(queries))
        heads = queries.reshape(hidden.shape[0], shape.num_heads, shape.nope + shape.rope)
        return heads, self.latent_norm(latent), shared_key

    def _attend(self, layer: int, queries: Tensor, batch: ForwardBatch, kv: KvView) -> Tensor:
        """[T, N, nope + rope] → [T, N x value], float64."""
        output = queries.new_empty(queries.shape[0], self.shape.num_heads, self.shape.value)
        few = [part for part in batch.sequences if part.stop - part.start <= self.absorbed_max_tokens]
        if few:
            self._attend_absorbed(layer, queries, few, kv, output)
        for part in batch.sequences:
            if part.stop - part.start > self.absorbed_max_tokens:
                rows = self._context(layer, part, kv)
                output[part.start : part.stop] = self._attend_expanded(queries[part.start : part.stop], rows)
        return output.flatten(1)

    def _attend_absorbed(
        self, layer: int, queries: Tensor, parts: Sequence[SequenceSlice], kv: KvView, output: Tensor
    ) -> None:
        """Take all parts' queries into the latent space at once, then attend part by part over the cache as it is."""
        picked = torch.cat([torch.arange(part.start, part.stop) for part in parts])
        nope, rope = torch.split(queries[picked], [self.shape.nope, self.shape.rope], dim=-1)
        latent = torch.bmm(nope.transpose(0, 1), self.absorption.keys).transpose(0, 1)  # [t, N, latent]
        absorbed = torch.split(torch.cat((latent, rope), dim=-1), [part.stop - part.start for part in parts])
        mixed = []
        for part, rows in zip(parts, absorbed, strict=True):
            context = self._context(layer, part, kv)[:, None]
            mixed.append(attend(rows, context, context[..., : self.shape.latent], self.scale))
        values = torch.bmm(torch.cat(mixed).transpose(0, 1), self.absorption.values)  # [N, t, value]
        output[picked] = values.transpose(0, 1)

    def _attend_expanded(self, queries: Tensor, rows: Tensor) -> Tensor:
        """Queries [t, N, nope + rope] over cached `rows` [C, W] → [t, N, value]."""
        latent, shared_key = torch.split(rows, [self.shape.latent, self.shape.rope], dim=-1)
        keys = torch.matmul(latent, self.absorption.keys.transpose(1, 2)).transpose(0, 1)  # [C, N, nope]
        values = torch.matmul(latent, self.absorption.values).transpose(0, 1)  # [C, N, value]
        shared = shared_key[:, None].expand(-1, self.shape.num_heads, -1)
        return attend(queries, torch.cat((keys, shared), dim=-1), values, self.scale)

    def _context(self, layer: int, part: SequenceSlice, kv: KvView) -> Tensor:
        return kv.read(layer, part.block_table, part.context_tokens).to(ATTENTION_DTYPE)
