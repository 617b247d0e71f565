"""Frames of a lane: the Unix socket between a caller and an expert shard on one machine (ADR 11).

    frame = head (80 bytes, little-endian) + tensors' bytes, in order + text

Owns the bytes of a frame and their limits. Says what `ForwardRequest` and `ForwardResponse` say, but tensors are sent
from where they are and received into where they stay. Knows no socket.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from torch import Tensor

from meshfire.api.common.v1 import tensor_pb2
from meshfire.errors import InvalidTensor
from meshfire.rpc import tensors

#: version, kind, zero; layer; hop_id, epoch, sent_ns, queue_ns, compute_ns; 3 x dtype, zero; 3 x (rows, columns); text
_HEAD = struct.Struct("<HBxiqqqqq3Bx6II")
HEAD_BYTES = _HEAD.size
VERSION = 1
#: of the body; as gRPC's limit of a message
MAX_BODY_BYTES = 4 * 1024 * 1024
_MAX_TENSORS = 3
_MAX_SPARES = 16
_NO_TENSOR = (tensor_pb2.DATA_TYPE_UNSPECIFIED, 0, 0)


_Buffer: TypeAlias = tuple[Tensor, memoryview]


class Kind(IntEnum):
    """What a frame is."""

    #: first of a caller; text = caller id
    HELLO = 1
    #: tensors = hidden [T, H], topk_ids [T, K], topk_weights [T, K]; text = traceparents, then a fault
    HOP = 2
    #: no more hops of these traces; text = traceparents
    FINISH = 3
    #: tensors = fixed40 sums [T, H]
    OUTPUT = 4
    #: text = a serialised ForwardError
    ERROR = 5


@dataclass(slots=True)
class Frame:
    """One message. Fields that its kind does not have are zero; every tensor has two dimensions."""

    kind: Kind
    hop_id: int = 0
    layer: int = 0
    #: of the placement that the caller routed by
    epoch: int = 0
    #: the sender's time.perf_counter_ns(): one clock for all processes of a machine
    sent_ns: int = 0
    queue_ns: int = 0
    compute_ns: int = 0
    tensors: Sequence[tuple[tensor_pb2.DataType.ValueType, Tensor]] = ()
    text: bytes = b""
    #: of a received frame: where its tensors' memory goes, and their bytes
    spares: Spares | None = None
    views: Sequence[memoryview] = ()

    def release(self) -> None:
        """Nobody looks at the tensors any more: what is received next may take their memory."""
        if self.spares is not None:
            for (dtype, tensor), view in zip(self.tensors, self.views, strict=True):
                self.spares.keep(dtype, (tensor, view))
        self.tensors, self.views, self.spares = (), (), None


class Spares:
    """Memory of received tensors, used again: decode steps have the same shapes, and fresh memory costs page faults.

    One thread receives and releases.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], list[_Buffer]] = {}
        self._num_kept = 0

    def take(self, dtype: int, rows: int, columns: int) -> _Buffer:
        """A tensor and its bytes. Raises InvalidTensor for an unknown dtype."""
        kept = self._kept.get((dtype, rows, columns))
        if not kept:
            return tensors.empty(dtype, (rows, columns))
        self._num_kept -= 1
        return kept.pop()

    def keep(self, dtype: int, buffer: _Buffer) -> None:
        """Nobody looks at it any more."""
        if self._num_kept == _MAX_SPARES:  # other shapes have come into use
            self._kept, self._num_kept = {}, 0
        self._kept.setdefault((dtype, *buffer[0].shape), []).append(buffer)
        self._num_kept += 1


def pack(frame: Frame) -> list[memoryview]:
    """The frame as buffers to send one after the other; tensors are viewed, not copied."""
    shapes = [(dtype, *tensor.shape) for dtype, tensor in frame.tensors]
    shapes += [_NO_TENSOR] * (_MAX_TENSORS - len(shapes))
    dtypes = [dtype for dtype, _, _ in shapes]
    sizes = [size for _, *both in shapes for size in both]
    head = _HEAD.pack(
        VERSION,
        frame.kind,
        frame.layer,
        frame.hop_id,
        frame.epoch,
        frame.sent_ns,
        frame.queue_ns,
        frame.compute_ns,
        *dtypes,
        *sizes,
        len(frame.text),
    )
    return [memoryview(head), *(tensors.view(tensor) for _, tensor in frame.tensors), memoryview(frame.text)]


def unpack(head: bytes | bytearray, spares: Spares) -> tuple[Frame, list[memoryview], bytearray]:
    """(frame with empty tensors, the buffers that its body goes into, the last of them: its text).

    Raises InvalidTensor for a head that no version-1 peer would send.
    """
    version, kind, layer, hop_id, epoch, sent_ns, queue_ns, compute_ns, *rest = _HEAD.unpack(head)
    if version != VERSION or not Kind.HELLO <= kind <= Kind.ERROR:
        raise InvalidTensor(f"a lane frame of version {version} and kind {kind}, expected version {VERSION}")
    dtypes, sizes, text_bytes = rest[:3], rest[3:9], rest[9]
    made = []
    num_bytes = text_bytes
    for dtype, rows, columns in zip(dtypes, sizes[::2], sizes[1::2], strict=True):
        if dtype:
            num_bytes += rows * columns * tensors.dtype_from_wire(dtype, field="dtype").itemsize
            if num_bytes > MAX_BODY_BYTES:
                break
            made.append((dtype, *spares.take(dtype, rows, columns)))
    if num_bytes > MAX_BODY_BYTES:
        raise InvalidTensor(f"a lane frame of {num_bytes} bytes, expected at most {MAX_BODY_BYTES}")
    text = bytearray(text_bytes)
    parts = [(dtype, tensor) for dtype, tensor, _ in made]
    views = [view for _, _, view in made]
    frame = Frame(Kind(kind), hop_id, layer, epoch, sent_ns, queue_ns, compute_ns, parts, b"", spares, views)
    return frame, [*views, memoryview(text)], text


def join_text(traceparents: Sequence[str], fault: str = "") -> bytes:
    """Text of a HOP or FINISH."""
    return "\n".join((",".join(traceparents), fault)).encode() if traceparents or fault else b""


def split_text(text: bytes) -> tuple[list[str], str]:
    """(traceparents, fault) of a HOP or FINISH."""
    if not text:
        return [], ""
    traces, _, fault = text.decode(errors="replace").partition("\n")
    return traces.split(",") if traces else [], fault
