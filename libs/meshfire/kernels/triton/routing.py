"""Which tile of a grouped product belongs to which expert, found on the device.

Owns the plan; nothing here waits for the host, and every shape depends only on the number of tokens, so a step can be
captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshfire.kernels.triton.tile import ROWS, num_tiles


@dataclass(frozen=True)
class TilePlan:
    """Choices sorted by expert and cut into tiles of one expert each; all int32.

    `order` [T x K]: sorted position → choice (row x K + column). Per tile: its `expert` (the number of experts for a
    tile that is not needed), its `first` sorted position and the position after its `last`.
    """

    order: Tensor
    expert: Tensor
    first: Tensor
    last: Tensor


def plan_tiles(topk_ids: Tensor, num_experts: int) -> TilePlan:
    """`topk_ids` [T, K]; ids outside 0 … num_experts - 1 (-1 = none) get no tile."""
    chosen = topk_ids.flatten().to(torch.int64)
    # What no expert takes is sorted behind all experts.
    chosen = torch.where((chosen >= 0) & (chosen < num_experts), chosen, num_experts)
    sorted_ids, order = torch.sort(chosen, stable=True)
    experts = torch.arange(num_experts, device=chosen.device)
    starts = torch.searchsorted(sorted_ids, experts)
    ends = torch.searchsorted(sorted_ids, experts, right=True)
    tiles_each = (ends - starts + ROWS - 1) // ROWS
    tiles_until = tiles_each.cumsum(0)
    tile = torch.arange(most_tiles(chosen.shape[0], num_experts), device=chosen.device)
    expert = torch.searchsorted(tiles_until, tile, right=True)
    known = expert.clamp(max=num_experts - 1)
    first = starts[known] + (tile - tiles_until[known] + tiles_each[known]) * ROWS
    return TilePlan(*(one.to(torch.int32) for one in (order, expert, first, ends[known])))


def most_tiles(num_choices: int, num_experts: int) -> int:
    """Tiles that suffice however the choices fall: each expert wastes at most one."""
    return min(num_choices, num_tiles(num_choices, ROWS) + num_experts)
