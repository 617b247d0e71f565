"""A model directory's safetensors files, mapped and read tensor by tensor.

Owns file formats: headers, shards and their index, dtypes. Knows nothing of what tensors mean.
Format: the safetensors specification (8 bytes of length, a JSON header, raw data).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshfire.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "BOOL": 1}
_ITEM_BYTES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2}
FLOATS = ("F32", "F16", "BF16")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies and what it is."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """One file's header: raw bytes, where the data starts, and its tensors."""

    path: Path
    raw: bytes
    data_start: int
    file_bytes: int
    tensors: dict[str, TensorInfo]


class Checkpoint:
    """All tensors of a directory by name. Files are mapped on first use; nothing is read before it is asked for."""

    def __init__(self, directory: Path) -> None:
        """Read the headers. Raises CheckpointError for missing, truncated or inconsistent files."""
        self.directory = directory
        self._tensors: dict[str, TensorInfo] = {}
        self._files: dict[Path, Any] = {}
        for header in read_headers(directory):
            for name, info in header.tensors.items():
                if name in self._tensors:
                    raise CheckpointError(f"tensor {name} is in two files of {directory}", field=name)
                self._tensors[name] = info

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def dtype(self, name: str) -> str:
        """A tensor's type as the header spells it. Raises CheckpointError if it is missing."""
        return self._found(name).dtype

    def read(
        self, name: str, shape: Sequence[int], part: tuple[slice, ...] = (), *, dtypes: Sequence[str] = FLOATS
    ) -> Tensor:
        """A tensor, or a part of it, in its stored type, one of `dtypes`. `shape` is what the whole must have.

        Raises CheckpointError naming tensor and file: missing, of another shape or type, unreadable.
        """
        info = self._found(name)
        if info.dtype not in dtypes:
            raise _wrong(name, info, f"is {info.dtype}, expected {' or '.join(dtypes)}")
        if info.shape != tuple(shape):
            raise _wrong(name, info, f"has shape {list(info.shape)}, expected {list(shape)}")
        try:
            tensor: Tensor = self._file(info.path).get_slice(name)[part or (slice(None),)]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"tensor {name} cannot be read from {info.path}: {error}", field=name) from error
        return tensor

    def _found(self, name: str) -> TensorInfo:
        info = self._tensors.get(name)
        if info is None:
            raise CheckpointError(f"tensor {name} is missing from {self.directory}", field=name)
        return info

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt")
        return self._files[path]


def _wrong(name: str, info: TensorInfo, what: str) -> CheckpointError:
    return CheckpointError(f"tensor {name} of {info.path} {what}", field=name)


def read_headers(directory: Path) -> list[Header]:
    """The headers of a directory's files in order of name; of an indexed checkpoint, only those that it lists."""
    index = directory / INDEX_FILE
    if not index.exists():
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{directory} holds no safetensors file", field="model.safetensors")
        return [_read_header(path) for path in paths]
    weight_map = _read_weight_map(index)
    headers = [_read_header(directory / name) for name in sorted(set(weight_map.values()))]
    found = {name: header.path.name for header in headers for name in header.tensors}
    for name, file in weight_map.items():
        if found.get(name) != file:
            raise CheckpointError(f"{index} promises tensor {name} in {file}, which lacks it", field=name)
    return headers


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no safetensors index: {error!r}", field=INDEX_FILE) from error
    for file in set(names.values()):
        if Path(file).name != file:
            raise CheckpointError(f"{index} points outside its directory: {file!r}", field=INDEX_FILE)
    return names


def _read_header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            raw = file.read(length) if length <= _MAX_HEADER_BYTES else b""
        file_bytes = path.stat().st_size
        entries = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}", field=path.name) from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} is no safetensors file: its header is no JSON object", field=path.name)
    entries.pop("__metadata__", None)
    data_start = 8 + length
    tensors = {name: _tensor_info(path, name, entry, file_bytes - data_start) for name, entry in entries.items()}
    return Header(path, raw, data_start, file_bytes, tensors)


def _tensor_info(path: Path, name: str, entry: Any, data_bytes: int) -> TensorInfo:
    try:
        shape = tuple(int(size) for size in entry["shape"])
        start, stop = (int(offset) for offset in entry["data_offsets"])
        info = TensorInfo(path, str(entry["dtype"]), shape, stop - start)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: the header's entry for {name} is broken", field=name) from error
    if min(shape, default=0) < 0:
        raise CheckpointError(f"{path}: tensor {name} has shape {list(shape)}", field=name)
    if not 0 <= start <= stop <= data_bytes:
        raise CheckpointError(f"{path} is truncated: tensor {name} ends at byte {stop} of {data_bytes}", field=name)
    item_bytes = _ITEM_BYTES.get(info.dtype)
    if item_bytes is not None and stop - start != math.prod(shape) * item_bytes:
        raise CheckpointError(f"{path}: tensor {name} has {stop - start} bytes for shape {list(shape)}", field=name)
    return info


def as_float32(tensor: Tensor) -> Tensor:
    """A float32 copy or view."""
    return tensor.to(torch.float32)
