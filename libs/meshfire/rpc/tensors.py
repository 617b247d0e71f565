"""Tensors on the wire: the only place that touches their bytes.

Little-endian, C-contiguous; bf16 as its 16-bit pattern; fixed40 as int64 in units of 2^-40.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshfire.api.common.v1 import tensor_pb2 as pb
from meshfire.errors import InvalidTensor

if sys.byteorder != "little":  # the wire is little-endian and bytes are viewed in place
    raise ImportError("meshfire.rpc.tensors needs a little-endian machine")

_TO_WIRE: dict[torch.dtype, pb.DataType.ValueType] = {
    torch.float32: pb.DATA_TYPE_FLOAT32,
    torch.bfloat16: pb.DATA_TYPE_BFLOAT16,
    torch.float16: pb.DATA_TYPE_FLOAT16,
    torch.int32: pb.DATA_TYPE_INT32,
    torch.int64: pb.DATA_TYPE_INT64,
}
_FROM_WIRE: dict[int, torch.dtype] = {int(wire): dtype for dtype, wire in _TO_WIRE.items()}
_FROM_WIRE[pb.DATA_TYPE_FIXED40] = torch.int64


#: types that numpy has as well; 16-bit floats pass through it as int16
_NUMPY: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.int32: np.int32,
    torch.int64: np.int64,
}


def dtype_to_wire(dtype: torch.dtype) -> pb.DataType.ValueType:
    """Wire name of a torch dtype. KeyError for one that never travels."""
    return _TO_WIRE[dtype]


def dtype_from_wire(wire: int, *, field: str) -> torch.dtype:
    """Torch dtype of a wire name. Raises InvalidTensor."""
    try:
        return _FROM_WIRE[wire]
    except KeyError:
        raise InvalidTensor(f"{field}: unknown dtype {wire}", field=field) from None


def encode(tensor: Tensor) -> pb.Tensor:
    """Any supported tensor."""
    return pb.Tensor(dtype=_TO_WIRE[tensor.dtype], shape=tensor.shape, data=to_bytes(tensor))


def encode_fixed(tensor: Tensor) -> pb.Tensor:
    """int64 fixed point, marked as such."""
    assert tensor.dtype is torch.int64
    return pb.Tensor(dtype=pb.DATA_TYPE_FIXED40, shape=tensor.shape, data=to_bytes(tensor))


def decode(
    message: pb.Tensor,
    *,
    field: str,
    dtypes: Sequence[pb.DataType.ValueType] | None = None,
    shape: Sequence[int | None] | None = None,
) -> Tensor:
    """The tensor in `message`, read-only in spirit: it may share the message's memory.

    `dtypes` and `shape` (None = any size) are what the caller accepts. Raises InvalidTensor, naming `field`.
    """
    sizes = tuple(message.shape)
    dtype = _check(message.dtype, sizes, field, dtypes, shape)
    return from_bytes(message.data, dtype, sizes, field=f"{field}.data")


def wire_of(tensor: Tensor, *, fixed: bool = False) -> pb.DataType.ValueType:
    """Wire name of a tensor's type; `fixed`: int64 fixed point, marked as such."""
    assert not fixed or tensor.dtype is torch.int64
    return pb.DATA_TYPE_FIXED40 if fixed else _TO_WIRE[tensor.dtype]


def check(
    wire: int,
    tensor: Tensor,
    *,
    field: str,
    dtypes: Sequence[pb.DataType.ValueType],
    shape: Sequence[int | None],
) -> Tensor:
    """A tensor that came as itself, held to what `decode` holds a message to. Raises InvalidTensor, naming `field`."""
    _check(wire, tuple(tensor.shape), field, dtypes, shape)
    return tensor


def view(tensor: Tensor) -> memoryview:
    """C-contiguous little-endian bytes of a CPU tensor that has dimensions, without a copy where it is contiguous."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return _bytes_of((tensor if tensor.dtype in _NUMPY else tensor.view(torch.int16)).numpy())


def empty(wire: int, shape: Sequence[int]) -> tuple[Tensor, memoryview]:
    """A tensor to read into, and its bytes. Raises InvalidTensor for an unknown dtype."""
    dtype = dtype_from_wire(wire, field="dtype")
    array = np.empty(shape, _NUMPY.get(dtype, np.int16))
    tensor = torch.from_numpy(array)
    return tensor if dtype in _NUMPY else tensor.view(dtype), _bytes_of(array)


def to_bytes(tensor: Tensor) -> bytes:
    """C-contiguous little-endian bytes of a CPU tensor."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else _scalar_bytes(tensor)


def from_bytes(data: bytes, dtype: torch.dtype, shape: Sequence[int], *, field: str) -> Tensor:
    """View bytes as a tensor. Raises InvalidTensor if their number is not shape x itemsize."""
    expected = prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise InvalidTensor(f"{field}: {len(data)} bytes, expected {expected}", field=field)
    if expected == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    # bytearray: torch wants writable memory; one copy, made by memcpy.
    return torch.frombuffer(bytearray(data), dtype=dtype).view(tuple(shape))


def _check(
    wire: int,
    sizes: Sequence[int],
    field: str,
    dtypes: Sequence[pb.DataType.ValueType] | None,
    shape: Sequence[int | None] | None,
) -> torch.dtype:
    """The torch dtype of what fits; raises InvalidTensor for anything else."""
    if dtypes is not None and wire not in dtypes:
        names = ", ".join(pb.DataType.Name(one) for one in dtypes)
        raise InvalidTensor(f"{field}: dtype {wire}, expected {names}", field=f"{field}.dtype")
    dtype = dtype_from_wire(wire, field=f"{field}.dtype")
    if any(size < 0 for size in sizes) or not _fits(sizes, shape):
        raise InvalidTensor(f"{field}: shape {list(sizes)}, expected {_pattern(shape)}", field=f"{field}.shape")
    return dtype


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return memoryview(array).cast("B") if array.size else memoryview(b"")  # type: ignore[arg-type]


def _scalar_bytes(tensor: Tensor) -> bytes:
    return to_bytes(tensor.reshape(1))


def _fits(sizes: Sequence[int], shape: Sequence[int | None] | None) -> bool:
    if shape is None:
        return True
    return len(sizes) == len(shape) and all(want is None or want == size for size, want in zip(sizes, shape))


def _pattern(shape: Sequence[int | None] | None) -> str:
    return "any" if shape is None else "[" + ", ".join("*" if one is None else str(one) for one in shape) + "]"
