"""Every tensor of a model, without its weights: from the files' headers, or from config.json alone.

Owns what each tensor counts as: how many parameters, and which process would hold it. Knows no sizes of memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from meshfire.errors import CheckpointError
from meshfire.model.checkpoint import read_headers
from meshfire.modelstore.made_configs import MadeConfig
from meshfire.modelstore.made_formats import Format, as_stored
from meshfire.modelstore.made_weights import parts

Role = Literal["expert", "embedding", "vision", "projector", "other"]

_FORMS: Mapping[str, Format] = {"compressed-tensors": "int4", "fp8": "fp8"}
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int32: "I32"}
_DTYPES[torch.float8_e4m3fn] = "F8_E4M3"
_PACKED_VALUES = 8
_NO_PARAMETERS = (".weight_scale", ".weight_scale_inv", ".weight_shape")


@dataclass(frozen=True)
class Entry:
    """One tensor as stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def num_parameters(self) -> int:
        """Numbers of the model that it holds: scales and shapes hold none, a packed word eight."""
        if self.name.endswith(_NO_PARAMETERS):
            return 0
        return math.prod(self.shape) * (_PACKED_VALUES if self.name.endswith(".weight_packed") else 1)

    @property
    def role(self) -> Role:
        """Which part of the model it belongs to."""
        if ".mlp.experts." in self.name:
            return "expert"
        if "vision_tower." in self.name:
            return "vision"
        if "mm_projector." in self.name or "multi_modal_projector." in self.name:
            return "projector"
        return "embedding" if "embed_tokens." in self.name else "other"


def from_files(directory: Path) -> list[Entry]:
    """What the headers say. Raises CheckpointError."""
    return [
        Entry(name, info.dtype, info.shape, info.num_bytes)
        for header in read_headers(directory)
        for name, info in header.tensors.items()
    ]


def from_config(config: Mapping[str, Any]) -> list[Entry]:
    """What a checkpoint of this configuration would hold. Raises CheckpointError for a field that is missing."""
    text = config.get("text_config", config)
    quantization = text.get("quantization_config") or config.get("quantization_config") or {}
    form = _FORMS.get(quantization.get("quant_method", ""), "plain")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "bfloat16")
    try:
        files = parts(MadeConfig(config, dtype, form))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"config.json lacks {error}", field=str(error).strip("'")) from error
    return [
        entry
        for file in files
        for tensor in file
        for entry in _stored(tensor.name, tensor.shape, "float32" if tensor.exact else dtype, form)
    ]


def _stored(name: str, shape: tuple[int, ...], dtype: str, form: Format) -> Iterator[Entry]:
    anonymous = re.sub(r"\.\d+\.", ".0.", name)
    for part, stored_dtype, stored_shape, num_bytes in _parts_of(anonymous, shape, dtype, form):
        # a part's name ends in its kind, which the anonymous name has too
        yield Entry(name.rpartition(".")[0] + part, stored_dtype, stored_shape, num_bytes)


@lru_cache(maxsize=1024)
def _parts_of(
    name: str, shape: tuple[int, ...], dtype: str, form: Format
) -> list[tuple[str, str, tuple[int, ...], int]]:
    """(".weight…", dtype, shape, bytes) of each stored part; tensors of equal layers are asked for once."""
    values = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    stored = as_stored(name, values, form)
    return [
        ("." + part.rpartition(".")[2], _DTYPES[one.dtype], tuple(one.shape), one.nbytes)
        for part, one in stored.items()
    ]
