"""Brings a prompt's KV from the prefill worker into this worker's blocks.

Owns the reader's side of a KV lease's stream: it asks for the blocks that are not held, verifies header, frames and
trailer before anything is believed, and ends the lease. Blocks are the caller's: whoever took them frees them if a read
fails. Knows nothing of routers or batches.

Rows are copied on the event loop (a memcpy of at most 1 MiB a frame), never on a thread: a cancelled read must not be
able to write one more row into a block that was freed meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc.aio
from torch import Tensor

from meshfire.api.common.v1 import tensor_pb2
from meshfire.api.prefill.v1 import prefill_service_pb2 as pb
from meshfire.api.prefill.v1 import prefill_service_pb2_grpc as rpc
from meshfire.errors import KvCorrupt, MeshfireError, Unavailable
from meshfire.kv.transfer import Frame, FrameAssembler, KvManifest, Trailer, check_manifest
from meshfire.model.interface import KvGeometry
from meshfire.rpc import geometry as geometries
from meshfire.rpc import tensors
from meshfire.rpc.status import from_rpc_error

_log = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 5.0

_FLOAT32 = (tensor_pb2.DATA_TYPE_FLOAT32,)


@dataclass(frozen=True)
class KvSource:
    """Where a sequence's KV waits, and under which grant."""

    #: host:port of the prefill worker
    address: str
    kv_lease_id: str
    epoch: int


@dataclass(frozen=True)
class KvRead:
    """A completed read."""

    #: hidden state of the last token after the final norm: [H] float32
    last_hidden: Tensor
    #: payload bytes that were sent
    num_bytes: int


class Channels(Protocol):
    """Where a channel to an address comes from; meshfire.rpc.channels.ChannelPool is one."""

    def get(self, address: str) -> grpc.aio.Channel:
        """A channel to `host:port`, shared with other callers."""


class KvImport(Protocol):
    """What takes the rows; meshfire.kv.store.KvStore is one."""

    geometry: KvGeometry

    def import_layers(self, block: int, layer_start: int, rows: Tensor) -> None:
        """Overwrite layers `layer_start …` of one block with `rows` [num_layers, P, W]."""


class KvReader:
    """Reads KV as one worker, into one store."""

    def __init__(
        self, channels: Channels, store: KvImport, *, reader_id: str, hidden_size: int, read_timeout_s: float
    ) -> None:
        self._channels = channels
        self._store = store
        self._reader_id = reader_id
        self._hidden_size = hidden_size
        self._read_timeout_s = read_timeout_s

    async def read(
        self, source: KvSource, wanted: KvManifest, block_table: Sequence[int], num_held_blocks: int
    ) -> KvRead:
        """Fill the blocks of `block_table` after the first `num_held_blocks`; the last hidden state in any case.

        Raises KvCorrupt, ModelMismatch, KvExpired and whatever else the owner says, Unavailable for one that is silent.
        """
        blocks = range(num_held_blocks, len(wanted.block_hashes))
        request = pb.ReadKvRequest(
            kv_lease_id=source.kv_lease_id,
            epoch=source.epoch,
            reader_id=self._reader_id,
            wanted_blocks=blocks,
            geometry=geometries.to_wire(wanted.geometry),
            model_revision=wanted.model_revision,
        )
        frames = self._responses(source, request)
        try:
            last_hidden = self._header(source, wanted, await anext(frames, None))
            return KvRead(last_hidden, await self._blocks(FrameAssembler(wanted.geometry, blocks), frames, block_table))
        finally:
            await frames.aclose()

    async def release(self, source: KvSource, *, acknowledged: bool) -> None:
        """End the lease at its owner. Best effort: an owner that does not hear of it frees by its deadline."""
        outcome = pb.KV_OUTCOME_ACKNOWLEDGED if acknowledged else pb.KV_OUTCOME_ABANDONED
        request = pb.ReleaseKvRequest(
            kv_lease_id=source.kv_lease_id, epoch=source.epoch, reader_id=self._reader_id, outcome=outcome
        )
        try:
            await rpc.PrefillServiceStub(self._channels.get(source.address)).ReleaseKv(
                request, timeout=RELEASE_TIMEOUT_S
            )
        except (MeshfireError, grpc.aio.AioRpcError) as error:
            _log.info("KV lease %s at %s not released: %s", source.kv_lease_id, source.address, error)

    async def _responses(self, source: KvSource, request: pb.ReadKvRequest) -> AsyncGenerator[pb.ReadKvResponse, None]:
        """The stream's messages; silence ends it. Leaving it early cancels the call."""
        call = rpc.PrefillServiceStub(self._channels.get(source.address)).ReadKv(request)
        messages = aiter(call)
        try:
            while True:
                async with asyncio.timeout(self._read_timeout_s):
                    message = await anext(messages, None)
                if message is None:
                    return
                yield message
        except TimeoutError:
            raise Unavailable(
                f"prefill worker {source.address} sent no KV for {self._read_timeout_s} s",
                metadata={"address": source.address},
            ) from None
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    def _header(self, source: KvSource, wanted: KvManifest, message: pb.ReadKvResponse | None) -> Tensor:
        if message is None or message.WhichOneof("frame") != "header":
            raise KvCorrupt("the KV stream does not begin with a header", field="header")
        header = message.header
        if (header.kv_lease_id, header.epoch) != (source.kv_lease_id, source.epoch):
            raise KvCorrupt(
                f"KV of lease {header.kv_lease_id} epoch {header.epoch}, "
                f"expected {source.kv_lease_id} epoch {source.epoch}",
                field="header.kv_lease_id",
            )
        check_manifest(wanted, _manifest_from(header))
        shape = (self._hidden_size,)
        return tensors.decode(header.last_hidden, field="header.last_hidden", dtypes=_FLOAT32, shape=shape)

    async def _blocks(
        self, assembler: FrameAssembler, frames: AsyncIterator[pb.ReadKvResponse], block_table: Sequence[int]
    ) -> int:
        async for message in frames:
            kind = message.WhichOneof("frame")
            if kind == "trailer":
                assembler.finish(Trailer(message.trailer.num_frames, message.trailer.num_bytes))
                return assembler.seen.num_bytes
            if kind != "block":
                raise KvCorrupt(f"a KV stream with a {kind} among its blocks", field="frame")
            rows = assembler.add(_frame_from(message.block))
            self._store.import_layers(block_table[message.block.block_index], message.block.layer_start, rows)
        raise KvCorrupt("the KV stream ended without its trailer", field="trailer")


def _manifest_from(header: pb.KvHeader) -> KvManifest:
    return KvManifest(
        model_revision=header.model_revision,
        geometry=geometries.from_wire(header.geometry),
        num_tokens=header.num_tokens,
        block_hashes=tuple(header.block_hashes),
    )


def _frame_from(block: pb.KvBlock) -> Frame:
    return Frame(block.block_index, block.layer_start, block.num_layers, block.data, block.checksum)
