"""The same kernels compiled for other instruction sets: their bits must not differ."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from meshfire.cache_dir import cache_dir
from meshfire.kernels.build import build
from meshfire.kernels.native import Kernels, kernels, load

LEVELS = {"best": (), "avx2": ("-mno-avx512f",), "scalar": ("-DMESHFIRE_SCALAR",)}

compiled = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")


def kernels_of(level: str) -> Kernels:
    """This process's kernels, or the same source for fewer instructions."""
    return kernels() if level == "best" else load(build(cache_dir() / "kernels", LEVELS[level]))


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers whose rows differ in size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.rand(shape[0], 1, generator=generator).exp()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal float32 tensors, NaN and signs of zero included."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
