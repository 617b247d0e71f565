"""The weighted sum over the experts that a gate chose.

Owns how expert outputs are combined: exactly, in fixed point, so the total does not depend on which process computed
which expert. Knows nothing of gates, transport or where weights come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshfire.errors import InvalidTensor, UnknownExpert
from meshfire.model.compute.interface import Ffn
from meshfire.model.fixed_point import MAX_TERMS, from_fixed, to_fixed


class ExpertSource(Protocol):
    """Where the weights of (layer, expert) pairs come from."""

    def load(self, layer: int, expert: int) -> Ffn:
        """Read one expert's tensors and nothing else. Raises UnknownExpert."""


def weighted_sum(hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Mapping[int, Ffn]) -> Tensor:
    """Sum over k of topk_weights · E_topk_ids(hidden), in units of 2^-40: int64 [T, H].

    `hidden` [T, H] float32, `topk_ids` [T, K] (-1 = no expert), `topk_weights` [T, K] float32. Raises UnknownExpert for
    an id that `experts` lacks, InvalidTensor for K above the fixed-point bound, NonFiniteValue.
    """
    if topk_ids.shape[1] > MAX_TERMS:
        raise InvalidTensor(f"topk_ids has {topk_ids.shape[1]} columns, expected at most {MAX_TERMS}", field="topk_ids")
    total = torch.zeros(hidden.shape, dtype=torch.int64)
    for expert, tokens, columns in _by_expert(topk_ids):
        if expert not in experts:
            raise UnknownExpert(f"expert {expert} is not held here", field="topk_ids", metadata={"expert": str(expert)})
        output = experts[expert](hidden[tokens]).to(torch.float64)
        weights = topk_weights[tokens, columns].to(torch.float64)
        total.index_add_(0, tokens, to_fixed(output * weights[:, None], field="hidden"))
    return total


def _by_expert(topk_ids: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """(expert, rows that chose it, columns in which they did) for each chosen expert, in order of id."""
    flat = topk_ids.reshape(-1)
    chosen, order = torch.sort(flat, stable=True)
    experts, counts = torch.unique_consecutive(chosen, return_counts=True)
    groups = torch.split(order, counts.tolist())
    num_columns = topk_ids.shape[1]
    return [
        (expert, group // num_columns, group % num_columns)
        for expert, group in zip(experts.tolist(), groups, strict=True)
        if expert != -1
    ]


@dataclass(frozen=True)
class ReadyExperts:
    """A dispatch that is already computed."""

    output: Tensor

    def result(self) -> Tensor:
        """The weighted sum: [T, H] float32."""
        return self.output


class LocalExperts:
    """Experts in this process; the same functions, hence the same bits, as on expert shards.

    Weights are read from the source on first use and kept.
    """

    def __init__(self, source: ExpertSource) -> None:
        self._source = source
        self._layers: dict[int, dict[int, Ffn]] = {}

    def dispatch(self, layer: int, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> ReadyExperts:
        """Compute the experts of one layer. Shapes as in `ExpertBackend`. Raises UnknownExpert, NonFiniteValue."""
        experts = self._layers.setdefault(layer, {})
        for expert in torch.unique(topk_ids).tolist():
            if expert != -1 and expert not in experts:
                experts[expert] = self._source.load(layer, expert)
        return ReadyExperts(from_fixed(weighted_sum(hidden, topk_ids, topk_weights, experts)))
