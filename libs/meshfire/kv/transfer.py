"""How a sequence's KV travels: what both sides must agree on, and blocks cut into checksummed frames and put together.

Owns the rules, as values; knows nothing of streams or messages. The order on a stream is: a manifest, the frames of
every wanted block in the wanted order and each block's layers first to last, then a trailer that counts them. A block
is cut by layers into frames of at most 1 MiB, so that no message comes near gRPC's 4 MiB limit; a layer is never cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshfire.errors import KvCorrupt, ModelMismatch
from meshfire.model.interface import KvGeometry

MAX_FRAME_BYTES = 1 << 20
CHECKSUM_BYTES = 16


@dataclass(frozen=True)
class KvManifest:
    """What a sequence's KV is: reader and owner build theirs independently and must find them equal."""

    model_revision: str
    geometry: KvGeometry
    num_tokens: int
    #: chain hash of every block, first to last
    block_hashes: tuple[bytes, ...]

    def tokens_in(self, block_index: int) -> int:
        """Tokens in one block of the sequence: P, or fewer in the last."""
        return min(self.geometry.block_tokens, self.num_tokens - block_index * self.geometry.block_tokens)


@dataclass(frozen=True)
class Frame:
    """Layers `layer_start … + num_layers` of one block, little-endian bytes of [num_layers, P, W]."""

    block_index: int
    layer_start: int
    num_layers: int
    data: bytes
    checksum: bytes


@dataclass(frozen=True)
class Trailer:
    """What was sent."""

    num_frames: int = 0
    num_bytes: int = 0

    def plus(self, frame: Frame) -> Trailer:
        """Count one more frame."""
        return replace(self, num_frames=self.num_frames + 1, num_bytes=self.num_bytes + len(frame.data))


def check_model(mine: KvGeometry, my_revision: str, theirs: KvGeometry, their_revision: str) -> None:
    """Raise ModelMismatch, naming what differs, unless both sides run the same model with the same KV layout."""
    _require_equal("model_revision", my_revision, their_revision, ModelMismatch)
    for name in ("num_layers", "block_tokens", "row_width", "dtype"):
        _require_equal(f"geometry.{name}", getattr(mine, name), getattr(theirs, name), ModelMismatch)


def check_manifest(mine: KvManifest, theirs: KvManifest) -> None:
    """Raise ModelMismatch or KvCorrupt, naming what differs, unless `theirs` is the KV that `mine` asks for."""
    check_model(mine.geometry, mine.model_revision, theirs.geometry, theirs.model_revision)
    _require_equal("num_tokens", mine.num_tokens, theirs.num_tokens, KvCorrupt)
    _require_equal("num_blocks", len(mine.block_hashes), len(theirs.block_hashes), KvCorrupt)
    for index, (my_hash, their_hash) in enumerate(zip(mine.block_hashes, theirs.block_hashes, strict=True)):
        _require_equal(f"block_hashes[{index}]", my_hash.hex(), their_hash.hex(), KvCorrupt)


def checksum(data: bytes) -> bytes:
    """blake2b-128 of a frame's bytes."""
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()


def layers_per_frame(geometry: KvGeometry) -> int:
    """Layers of one block that fit a frame; at least one."""
    return max(1, MAX_FRAME_BYTES * geometry.num_layers // geometry.block_bytes)


def slice_block(block_index: int, block: Tensor, geometry: KvGeometry) -> Iterator[Frame]:
    """Cut one exported block [L, P, W] into frames."""
    step = layers_per_frame(geometry)
    for start in range(0, geometry.num_layers, step):
        layers = block[start : start + step].contiguous()
        data = layers.view(torch.uint8).numpy().tobytes()
        yield Frame(block_index, start, layers.shape[0], data, checksum(data))


class FrameAssembler:
    """Checks the frames of one stream and turns each into rows to import.

    Raises KvCorrupt for anything but exactly the wanted blocks, each complete, in order, with the right checksums.
    """

    def __init__(self, geometry: KvGeometry, wanted_blocks: Sequence[int]) -> None:
        self._geometry = geometry
        self._wanted = tuple(wanted_blocks)
        self._position = 0  # in _wanted
        self._layer = 0  # next layer of that block
        self.seen = Trailer()

    def add(self, frame: Frame) -> Tensor:
        """Verify the next frame; its rows [num_layers, P, W] in the geometry's dtype."""
        self._check_order(frame)
        geometry = self._geometry
        shape = (frame.num_layers, geometry.block_tokens, geometry.row_width)
        expected = frame.num_layers * geometry.block_bytes // geometry.num_layers
        if len(frame.data) != expected:
            raise KvCorrupt(f"{_name(frame)}: {len(frame.data)} bytes, expected {expected}", field="block.data")
        if checksum(frame.data) != frame.checksum:
            raise KvCorrupt(f"{_name(frame)}: bytes do not match their checksum", field="block.checksum")
        self._advance(frame)
        return torch.frombuffer(bytearray(frame.data), dtype=geometry.dtype).view(shape)

    def finish(self, trailer: Trailer) -> None:
        """Verify that nothing is missing and that the sender counted the same."""
        if self._position != len(self._wanted):
            raise KvCorrupt(
                f"the stream ended at layer {self._layer} of wanted block {self._wanted[self._position]} "
                f"({self._position} of {len(self._wanted)} blocks are complete)",
                field="trailer",
            )
        if trailer != self.seen:
            raise KvCorrupt(f"the sender counted {trailer}, seen were {self.seen}", field="trailer")

    def _check_order(self, frame: Frame) -> None:
        if self._position == len(self._wanted):
            raise KvCorrupt(f"{_name(frame)}: all wanted blocks were complete", field="block.block_index")
        expected = self._wanted[self._position]
        if frame.block_index != expected or frame.layer_start != self._layer:
            raise KvCorrupt(
                f"{_name(frame)}: expected block {expected} from layer {self._layer}", field="block.block_index"
            )
        if not 0 < frame.num_layers <= self._geometry.num_layers - self._layer:
            raise KvCorrupt(f"{_name(frame)}: {frame.num_layers} layers do not fit", field="block.num_layers")

    def _advance(self, frame: Frame) -> None:
        self.seen = self.seen.plus(frame)
        self._layer += frame.num_layers
        if self._layer == self._geometry.num_layers:
            self._position, self._layer = self._position + 1, 0


def _name(frame: Frame) -> str:
    return f"KV block {frame.block_index} from layer {frame.layer_start}"


def _require_equal(name: str, mine: object, theirs: object, error: type[ModelMismatch] | type[KvCorrupt]) -> None:
    if mine != theirs:
        raise error(
            f"{name} differs: reader {mine}, owner {theirs}",
            field=name,
            metadata={"mine": str(mine), "theirs": str(theirs)},
        )
