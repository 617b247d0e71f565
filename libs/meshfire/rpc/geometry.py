"""KvGeometry on the wire."""

from __future__ import annotations

from meshfire.api.common.v1 import kv_pb2
from meshfire.model.interface import KvGeometry
from meshfire.rpc import tensors


def to_wire(geometry: KvGeometry) -> kv_pb2.KvGeometry:
    """As a message."""
    return kv_pb2.KvGeometry(
        num_layers=geometry.num_layers,
        block_tokens=geometry.block_tokens,
        row_width=geometry.row_width,
        dtype=tensors.dtype_to_wire(geometry.dtype),
    )


def from_wire(message: kv_pb2.KvGeometry) -> KvGeometry:
    """From a message. Raises InvalidTensor for an unknown dtype."""
    return KvGeometry(
        num_layers=message.num_layers,
        block_tokens=message.block_tokens,
        row_width=message.row_width,
        dtype=tensors.dtype_from_wire(message.dtype, field="geometry.dtype"),
    )
