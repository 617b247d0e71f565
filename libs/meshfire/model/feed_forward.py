"""The FFN of a decoder layer as its worker sees it: here, in slices elsewhere, or routed to experts.

Owns when experts are dispatched and what is computed while they are pending. Knows nothing of where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshfire.model.compute.interface import Ffn
from meshfire.model.gate import Gate
from meshfire.model.interface import ExpertBackend, PendingExperts


class FeedForward(Protocol):
    """Second half of a layer."""

    def __call__(self, layer: int, hidden: Tensor, experts: ExpertBackend) -> Tensor:
        """[T, H] → [T, H] float32."""

    def begin(self, layer: int, hidden: Tensor, experts: ExpertBackend) -> Callable[[], Tensor]:
        """The same in two steps: what others compute is under way when this returns; call what it returns once."""


@dataclass(frozen=True)
class WholeFfn:
    """A dense FFN computed in this process."""

    ffn: Ffn

    def __call__(self, layer: int, hidden: Tensor, experts: ExpertBackend) -> Tensor:
        """As FeedForward; `experts` is not asked."""
        return self.ffn(hidden)

    def begin(self, layer: int, hidden: Tensor, experts: ExpertBackend) -> Callable[[], Tensor]:
        """As FeedForward; nobody else computes anything."""
        return lambda: self.ffn(hidden)


@dataclass(frozen=True)
class SlicedFfn:
    """A dense FFN whose slices are experts that every token chooses with weight 1."""

    num_slices: int

    def __call__(self, layer: int, hidden: Tensor, experts: ExpertBackend) -> Tensor:
        """As FeedForward."""
        return self.begin(layer, hidden, experts)()

    def begin(self, layer: int, hidden: Tensor, experts: ExpertBackend) -> Callable[[], Tensor]:
        """As FeedForward."""
        num_tokens = hidden.shape[0]
        ids = torch.arange(self.num_slices, dtype=torch.int32).repeat(num_tokens, 1)
        return experts.dispatch(layer, hidden, ids, torch.ones(num_tokens, self.num_slices)).result


@dataclass(frozen=True)
class RoutedFfn:
    """Routed experts plus the shared expert, which is computed while the routed ones are under way."""

    gate: Gate
    shared: Ffn | None

    def __call__(self, layer: int, hidden: Tensor, experts: ExpertBackend) -> Tensor:
        """As FeedForward."""
        return self.begin(layer, hidden, experts)()

    def begin(self, layer: int, hidden: Tensor, experts: ExpertBackend) -> Callable[[], Tensor]:
        """As FeedForward."""
        shared = self.shared
        pending = experts.dispatch(layer, hidden, *self.gate.choose(hidden))
        return pending.result if shared is None else lambda: _sum(shared(hidden), pending)


def _sum(shared: Tensor, pending: PendingExperts) -> Tensor:
    return pending.result() + shared
