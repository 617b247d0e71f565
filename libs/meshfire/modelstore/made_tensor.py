"""One tensor of a made model: its name, its shape and how it is drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

_NORM_SPREAD = 0.1


@dataclass(frozen=True)
class MadeTensor:
    """One tensor to draw: `mean` + `spread` · normal. `exact` = kept in float32 whatever the matrices are."""

    name: str
    shape: tuple[int, ...]
    spread: float
    mean: float = 0.0
    exact: bool = False

    def draw(self, seed: int, dtype: torch.dtype) -> Tensor:
        """The same values for the same seed and name, whatever else is drawn."""
        key = hashlib.sha256(f"{seed}:{self.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))
        values = torch.randn(self.shape, generator=generator) * self.spread + self.mean
        return values.to(torch.float32 if self.exact else dtype)


def matrix(name: str, rows: int, columns: int) -> MadeTensor:
    """`name`.weight, which keeps the size of what passes through it."""
    return MadeTensor(f"{name}.weight", (rows, columns), columns**-0.5)


def norm(name: str, size: int) -> MadeTensor:
    """`name`.weight around 1."""
    return MadeTensor(f"{name}.weight", (size,), _NORM_SPREAD, mean=1.0)


def layer_norm(name: str, size: int) -> Iterator[MadeTensor]:
    """`name`.weight around 1 and `name`.bias around 0."""
    yield norm(name, size)
    yield MadeTensor(f"{name}.bias", (size,), _NORM_SPREAD)


def unbiased(name: str, shape: tuple[int, int]) -> Iterator[MadeTensor]:
    """`name`.weight alone."""
    yield matrix(name, *shape)


def biased(name: str, shape: tuple[int, ...]) -> Iterator[MadeTensor]:
    """`name`.weight [out, …] and `name`.bias [out]."""
    yield MadeTensor(f"{name}.weight", shape, prod(shape[1:]) ** -0.5)
    yield MadeTensor(f"{name}.bias", shape[:1], _NORM_SPREAD)
