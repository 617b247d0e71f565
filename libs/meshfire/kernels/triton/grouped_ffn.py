"""The experts of one layer as two grouped products: gate and up with silu between, then down. Weights bf16 or INT4.

Owns the kernels. INT4 is compressed-tensors' pack-quantized layout, read as it is in the checkpoint: eight values of
the input dimension in an int32, lowest nibble first, q + 8 stored, one bfloat16 scale per 32 values; a value is
q x scale rounded to bfloat16. Each choice's output is kept apart, so that the caller can add them exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfire.kernels.triton.routing import TilePlan, plan_tiles
from meshfire.kernels.triton.tile import COLUMNS, INNER, ROWS, dot, interpreting, num_tiles, to_bfloat16

INT4_GROUP = 32


@dataclass(frozen=True)
class ExpertMatrices:
    """One matrix of every expert: bfloat16 [E, out, in], or int32 [E, out, in / 8] with `scales` [E, out, in / 32]."""

    values: Tensor
    scales: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.values.shape[0]

    @property
    def num_columns(self) -> int:
        """Size of an output row."""
        return self.values.shape[1]


def grouped_ffn(
    rows: Tensor, topk_ids: Tensor, gate: ExpertMatrices, up: ExpertMatrices, down: ExpertMatrices
) -> Tensor:
    """`rows` [T, H] bfloat16, `topk_ids` [T, K] → each choice's FFN output [T, K, H] float32, 0 where id is -1.

    The inner rows are rounded to bfloat16 between the products.
    """
    num_rows, hidden = rows.shape
    top_k = topk_ids.shape[1]
    plan = plan_tiles(topk_ids, gate.num_experts)
    num_inner = gate.num_columns
    inner = torch.empty(num_rows * top_k, num_inner, dtype=torch.bfloat16, device=rows.device)
    output = torch.zeros(num_rows * top_k, hidden, dtype=torch.float32, device=rows.device)
    tiles = plan.expert.shape[0]
    if tiles:
        _launch(_gated, (tiles, num_tiles(num_inner, COLUMNS)), rows, inner, plan, gate, up, hidden, top_k)
        _launch(_down, (tiles, num_tiles(hidden, COLUMNS)), inner, output, plan, down, down, num_inner, top_k)
    return output.view(num_rows, top_k, hidden)


def _launch(
    kernel: triton.runtime.JITFunction,
    grid: tuple[int, int],
    source: Tensor,
    target: Tensor,
    plan: TilePlan,
    first: ExpertMatrices,
    second: ExpertMatrices,
    num_inner: int,
    top_k: int,
) -> None:
    packed = first.scales is not None
    kernel[grid](
        source,
        target,
        plan.order,
        plan.expert,
        plan.first,
        plan.last,
        first.values,
        first.scales if packed else first.values,
        second.values,
        second.scales if packed else second.values,
        first.num_experts,
        first.num_columns,
        num_inner,
        top_k,
        packed,
        INT4_GROUP,
        ROWS,
        COLUMNS,
        INNER,
        interpreting(),
    )


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    values_ptr,
    scales_ptr,
    expert,
    column,
    inner,
    num_columns,
    num_inner,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """A tile [columns, inner] of one expert's matrix, bfloat16."""
    inside = (column < num_columns)[:, None] & (inner < num_inner)[None, :]
    line = expert.to(tl.int64) * num_columns + column[:, None]
    if PACKED:
        words = tl.load(values_ptr + line * (num_inner // 8) + (inner // 8)[None, :], mask=inside, other=0)
        scales = tl.load(scales_ptr + line * (num_inner // GROUP) + (inner // GROUP)[None, :], mask=inside, other=0.0)
        nibbles = ((words >> ((inner % 8) * 4)[None, :]) & 15) - 8
        return to_bfloat16(nibbles.to(tl.float32) * scales.to(tl.float32), UPCAST)
    return tl.load(values_ptr + line * num_inner + inner[None, :], mask=inside, other=0.0)


@triton.jit
def _gated(  # type: ignore[no-untyped-def]
    source_ptr,
    target_ptr,
    order_ptr,
    expert_ptr,
    first_ptr,
    last_ptr,
    gate_ptr,
    gate_scales_ptr,
    up_ptr,
    up_scales_ptr,
    num_experts,
    num_columns,
    num_inner,
    top_k,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """silu(gate x) · up x for one tile: reads the tokens of its choices, writes at their sorted positions."""
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile)
    if expert < num_experts:
        position = tl.load(first_ptr + tile) + tl.arange(0, TILE_ROWS)
        taken = position < tl.load(last_ptr + tile)
        token = tl.load(order_ptr + position, mask=taken, other=0) // top_k
        column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        gate = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.float32)
        up = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.float32)
        for start in range(0, num_inner, TILE_INNER):
            inner = start + tl.arange(0, TILE_INNER)
            rows = tl.load(
                source_ptr + token[:, None].to(tl.int64) * num_inner + inner[None, :],
                mask=taken[:, None] & (inner < num_inner)[None, :],
                other=0.0,
            )
            weights = _weights(
                gate_ptr, gate_scales_ptr, expert, column, inner, num_columns, num_inner, PACKED, GROUP, UPCAST
            )
            gate = dot(rows, tl.trans(weights), gate, UPCAST)
            weights = _weights(
                up_ptr, up_scales_ptr, expert, column, inner, num_columns, num_inner, PACKED, GROUP, UPCAST
            )
            up = dot(rows, tl.trans(weights), up, UPCAST)
        tl.store(
            target_ptr + position[:, None].to(tl.int64) * num_columns + column[None, :],
            to_bfloat16(gate / (1.0 + tl.exp(-gate)) * up, UPCAST),
            mask=taken[:, None] & (column < num_columns)[None, :],
        )


@triton.jit
def _down(  # type: ignore[no-untyped-def]
    source_ptr,
    target_ptr,
    order_ptr,
    expert_ptr,
    first_ptr,
    last_ptr,
    down_ptr,
    down_scales_ptr,
    unused_ptr,
    unused_scales_ptr,
    num_experts,
    num_columns,
    num_inner,
    top_k,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The second product for one tile: reads sorted positions, writes each row where its choice is."""
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile)
    if expert < num_experts:
        position = tl.load(first_ptr + tile) + tl.arange(0, TILE_ROWS)
        taken = position < tl.load(last_ptr + tile)
        choice = tl.load(order_ptr + position, mask=taken, other=0)
        column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        total = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.float32)
        for start in range(0, num_inner, TILE_INNER):
            inner = start + tl.arange(0, TILE_INNER)
            rows = tl.load(
                source_ptr + position[:, None].to(tl.int64) * num_inner + inner[None, :],
                mask=taken[:, None] & (inner < num_inner)[None, :],
                other=0.0,
            )
            weights = _weights(
                down_ptr, down_scales_ptr, expert, column, inner, num_columns, num_inner, PACKED, GROUP, UPCAST
            )
            total = dot(rows, tl.trans(weights), total, UPCAST)
        tl.store(
            target_ptr + choice[:, None].to(tl.int64) * num_columns + column[None, :],
            total,
            mask=taken[:, None] & (column < num_columns)[None, :],
        )
