"""Causal attention over a paged KV cache: MLA's absorbed form and grouped queries, in one kernel.

A cached row holds the keys and values of its token. Keys may be in two pieces: MLA's latent and the rotated key that
all heads share; its value is the latent again. A context is cut at fixed positions and the pieces are merged first to
last, so a token's result depends neither on its batch nor on the chunk that it came in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfire.kernels.triton.tile import dot, interpreting, num_tiles, to_bfloat16

#: keys of one piece of a context, and of one round of its loop
SPLIT_TOKENS = 1024
ROUND_TOKENS = 32
#: the least rows of a dot
_LEAST_HEADS = 16


@dataclass(frozen=True)
class RowLayout:
    """Where keys and values are in a row of W numbers, for each of `num_groups` groups of query heads.

    Group g's key is `key` numbers from g x `key`, then `shared` numbers (of all groups) from `shared_at`; its value is
    `value` numbers from `value_at` + g x `value`.
    """

    num_groups: int
    key: int
    shared: int
    shared_at: int
    value: int
    value_at: int

    @classmethod
    def latent(cls, latent: int, rope: int) -> RowLayout:
        """MLA: one group, the value is the first piece of the key."""
        return cls(1, latent, rope, latent, latent, 0)

    @classmethod
    def grouped(cls, num_groups: int, head_dim: int) -> RowLayout:
        """GQA: all key heads, then all value heads."""
        return cls(num_groups, head_dim, 0, 0, head_dim, num_groups * head_dim)


@dataclass(frozen=True)
class Queries:
    """`sequence` [T] says whose block table each row of the step uses, `position` [T] where it is: both int32.

    `block_tables` [B, M] int32; entries behind a sequence's context are never read. `max_context` bounds position + 1.
    """

    sequence: Tensor
    position: Tensor
    block_tables: Tensor
    block_tokens: int
    max_context: int


def paged_attention(queries: Tensor, rows: Tensor, layout: RowLayout, step: Queries, scale: float) -> Tensor:
    """`queries` [T, N, key + shared] and cache `rows` [S, W], of one dtype → [T, N, value] float32.

    N = groups x heads of each. Scores and sums are float32.
    """
    num_tokens, num_heads, _ = queries.shape
    splits = num_tiles(step.max_context, SPLIT_TOKENS)
    shape = (num_tokens, num_heads, splits)
    parts = torch.empty(*shape, layout.value, dtype=torch.float32, device=queries.device)
    peaks, sums = (torch.empty(shape, dtype=torch.float32, device=queries.device) for _ in range(2))
    output = torch.empty(num_tokens, num_heads, layout.value, dtype=torch.float32, device=queries.device)
    if num_tokens == 0:
        return output
    heads_each = num_heads // layout.num_groups
    _attend_split[(num_tokens, layout.num_groups, splits)](
        queries,
        rows,
        step.sequence,
        step.position,
        step.block_tables,
        parts,
        peaks,
        sums,
        scale,
        step.block_tables.shape[1],
        step.block_tokens,
        rows.shape[1],
        num_heads,
        heads_each,
        splits,
        layout.shared_at,
        layout.value_at,
        layout.key,
        layout.shared,
        layout.value,
        max(_LEAST_HEADS, triton.next_power_of_2(heads_each)),
        triton.next_power_of_2(layout.key),
        max(16, triton.next_power_of_2(max(1, layout.shared))),
        triton.next_power_of_2(layout.value),
        SPLIT_TOKENS,
        ROUND_TOKENS,
        interpreting(),
    )
    _merge_splits[(num_tokens, num_heads)](
        parts, peaks, sums, output, num_heads, splits, layout.value, triton.next_power_of_2(layout.value)
    )
    return output


@triton.jit
def _attend_split(  # type: ignore[no-untyped-def]
    queries_ptr,
    rows_ptr,
    sequence_ptr,
    position_ptr,
    tables_ptr,
    parts_ptr,
    peaks_ptr,
    sums_ptr,
    scale,
    table_width,
    block_tokens,
    row_width,
    num_heads,
    heads_each,
    num_splits,
    shared_at,
    value_at,
    KEY: tl.constexpr,
    SHARED: tl.constexpr,
    VALUE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    SHARED_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    ROUND: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One query token, one group of heads, one piece of the context: its unnormalised output, largest score and sum."""
    token, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(position_ptr + token) + 1
    table_ptr = tables_ptr + tl.load(sequence_ptr + token).to(tl.int64) * table_width
    head = tl.arange(0, HEADS)
    at_key, at_shared = tl.arange(0, KEY_PADDED), tl.arange(0, SHARED_PADDED)
    at_value = tl.arange(0, VALUE_PADDED)
    known = head < heads_each
    line = token.to(tl.int64) * num_heads + group * heads_each + head
    query_ptr = queries_ptr + line[:, None] * (KEY + SHARED)
    query = tl.load(query_ptr + at_key[None, :], mask=known[:, None] & (at_key < KEY)[None, :], other=0.0)
    query_shared = tl.load(
        query_ptr + KEY + at_shared[None, :], mask=known[:, None] & (at_shared < SHARED)[None, :], other=0.0
    )
    peak = tl.full((HEADS,), -float("inf"), dtype=tl.float32)
    weight_sum = tl.zeros((HEADS,), dtype=tl.float32)
    total = tl.zeros((HEADS, VALUE_PADDED), dtype=tl.float32)
    first = split * SPLIT
    for start in range(first, tl.minimum(first + SPLIT, context), ROUND):
        place = start + tl.arange(0, ROUND)
        seen = place < context
        block = tl.load(table_ptr + place // block_tokens, mask=seen, other=0)
        row_ptr = rows_ptr + (block.to(tl.int64) * block_tokens + place % block_tokens)[:, None] * row_width
        key = tl.load(row_ptr + group * KEY + at_key[None, :], mask=seen[:, None] & (at_key < KEY)[None, :], other=0.0)
        scores = dot(query, tl.trans(key), tl.zeros((HEADS, ROUND), dtype=tl.float32), UPCAST)
        if SHARED > 0:
            shared = tl.load(
                row_ptr + shared_at + at_shared[None, :],
                mask=seen[:, None] & (at_shared < SHARED)[None, :],
                other=0.0,
            )
            scores = dot(query_shared, tl.trans(shared), scores, UPCAST)
        scores = tl.where(seen[None, :], scores * scale, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(peak - higher)
        value = tl.load(
            row_ptr + value_at + group * VALUE + at_value[None, :],
            mask=seen[:, None] & (at_value < VALUE)[None, :],
            other=0.0,
        )
        if value.dtype == tl.bfloat16:
            total = dot(to_bfloat16(weights, UPCAST), value, total * shrink[:, None], UPCAST)
        else:
            total = dot(weights, value, total * shrink[:, None], UPCAST)
        weight_sum = weight_sum * shrink + tl.sum(weights, axis=1)
        peak = higher
    where = line * num_splits + split
    tl.store(peaks_ptr + where, peak, mask=known)
    tl.store(sums_ptr + where, weight_sum, mask=known)
    tl.store(
        parts_ptr + where[:, None] * VALUE + at_value[None, :],
        total,
        mask=known[:, None] & (at_value < VALUE)[None, :],
    )


@triton.jit
def _merge_splits(  # type: ignore[no-untyped-def]
    parts_ptr,
    peaks_ptr,
    sums_ptr,
    output_ptr,
    num_heads,
    num_splits,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
):
    """Pieces of one token and head, first to last; one past the context has sum 0 and changes nothing."""
    line = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    at_value = tl.arange(0, VALUE_PADDED)
    peak = tl.load(peaks_ptr + line * num_splits)
    weight_sum = tl.load(sums_ptr + line * num_splits)
    total = tl.load(parts_ptr + line * num_splits * VALUE + at_value, mask=at_value < VALUE, other=0.0)
    for split in range(1, num_splits):
        where = line * num_splits + split
        more = tl.load(sums_ptr + where)
        if more > 0:
            other_peak = tl.load(peaks_ptr + where)
            higher = tl.maximum(peak, other_peak)
            mine, theirs = tl.exp(peak - higher), tl.exp(other_peak - higher)
            part = tl.load(parts_ptr + where * VALUE + at_value, mask=at_value < VALUE, other=0.0)
            total = total * mine + part * theirs
            weight_sum = weight_sum * mine + more * theirs
            peak = higher
    tl.store(
        output_ptr + line * VALUE + at_value,
        total / weight_sum,
        mask=at_value < VALUE,
    )
