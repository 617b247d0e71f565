"""What a compute path offers to the models: weights packed its way, and products with them.

Owns the contract, no arithmetic. Whatever the path, a row's result does not depend on the other rows of a call
(design §5); a path that cannot keep that says so in its name. Gates, norms and the embedding are float32 everywhere:
they are cheap, and experts must be chosen alike on every path.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from meshfire.model.stored import StoredFfn, StoredWeight


class Linear(Protocol):
    """y = x Wᵀ + b with a packed weight."""

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight."""

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, in] float32 → [T, out] float32."""


class Ffn(Protocol):
    """down(silu(gate x) · up x) with packed weights."""

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weights."""

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, H] float32 → [T, H] float32."""


class Compute(Protocol):
    """One path. Packing copies: nothing packed refers to the checkpoint's memory."""

    @property
    def name(self) -> str:
        """As `--compute` spells it."""

    def linear(self, weight: StoredWeight, bias: Tensor | None = None) -> Linear:
        """Pack a matrix [out, in] and a bias [out]."""

    def ffn(self, weights: StoredFfn) -> Ffn:
        """Pack one SwiGLU."""

    def gated(self, gate: StoredWeight, up: StoredWeight) -> Linear:
        """Pack the first half of a SwiGLU: x → silu(gate x) · up x. `linear(down)` of it has the bits of `ffn`."""
