"""Writes a safetensors file one tensor at a time, so that memory holds the largest tensor and not the model.

Format: 8 bytes little-endian header length, JSON header {name: {dtype, shape, data_offsets}}, data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

_ALIGNMENT_BYTES = 8
_ITEM_BYTES = 4


class Weight(Protocol):
    """A float32 tensor that is read when its turn comes."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(self) -> npt.NDArray[np.float32]: ...


class Written(Protocol):
    """Told how many bytes are written of how many."""

    def __call__(self, done: int, total: int) -> None: ...


def write(path: Path, weights: Iterable[Weight], written: Written) -> None:
    """Write all as float32."""
    ordered = sorted(weights, key=lambda weight: weight.name)
    total, done = sum(_size_bytes(weight) for weight in ordered), 0
    with path.open("wb") as file:
        file.write(_header(ordered))
        for weight in ordered:
            written(done, total)
            values = np.ascontiguousarray(weight.read(), dtype="<f4")
            assert values.shape == weight.shape
            file.write(values.data)
            done += values.nbytes
    written(done, total)


def _header(weights: Sequence[Weight]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for weight in weights:
        stop = start + _size_bytes(weight)
        entries[weight.name] = {"dtype": "F32", "shape": list(weight.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _size_bytes(weight: Weight) -> int:
    return prod(weight.shape) * _ITEM_BYTES
