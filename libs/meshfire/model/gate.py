"""The gate of DeepSeek-V3 and Kimi K2.5: which experts a token goes to, and with what weight.

Owns `noaux_tc`: sigmoid scores, a correction bias that takes part in the choice alone, groups, normalised weights.
Source: DeepSeek-V3, arXiv 2412.19437 §2.1.2. Knows nothing of expert weights or places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshfire.model.linear import linear

_GROUP_BEST = 2  # a group is rated by the sum of its two best experts


@dataclass(frozen=True)
class Gate:
    """`weight` [E, H] packed, `correction_bias` [E] float32. One group of all experts = no group limit."""

    weight: Tensor
    correction_bias: Tensor
    top_k: int
    num_groups: int
    topk_groups: int
    normalise: bool
    scaling_factor: float

    def choose(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`hidden` [T, H] → topk_ids [T, K] int32 in ascending order, topk_weights [T, K] float32.

        Scores after the product are float64, so that no rounding depends on the number of rows.
        """
        scores = linear(hidden, self.weight).to(torch.float64).sigmoid()
        choice = self._limit_groups(scores + self.correction_bias)
        ids = torch.topk(choice, self.top_k, dim=-1).indices.sort(dim=-1).values
        weights = scores.gather(1, ids)
        if self.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return ids.to(torch.int32), (weights * self.scaling_factor).to(torch.float32)

    def _limit_groups(self, choice: Tensor) -> Tensor:
        """-inf for experts outside the best `topk_groups` groups: [T, E] → [T, E]."""
        if self.num_groups <= 1:
            return choice
        grouped = choice.view(choice.shape[0], self.num_groups, -1)
        ratings = grouped.topk(_GROUP_BEST, dim=-1).values.sum(dim=-1)
        kept = ratings.topk(self.topk_groups, dim=-1).indices
        hidden = torch.ones_like(ratings, dtype=torch.bool).scatter_(1, kept, False)
        return grouped.masked_fill(hidden[..., None], float("-inf")).flatten(1)
