"""PrefillService on the wire: reads and releases of offered KV. All decisions are the shelf's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, TypeAlias

import grpc.aio
from opentelemetry.trace import Tracer

from meshfire.api.prefill.v1 import prefill_service_pb2 as pb
from meshfire.api.prefill.v1 import prefill_service_pb2_grpc as rpc
from meshfire.errors import BadInput
from meshfire.kv.store import KvStore
from meshfire.kv.transfer import Frame, Trailer, check_model, slice_block
from meshfire.telemetry import names
from meshfire.telemetry.spans import span
from services.prefill import wire
from services.prefill.instruments import PrefillInstruments
from services.prefill.shelf import KvRead, KvShelf, Offered

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class PrefillServicer(rpc.PrefillServiceServicer):
    """Wire <-> domain."""

    def __init__(
        self,
        shelf: KvShelf,
        store: KvStore,
        model_revision: str,
        tracer: Tracer,
        instruments: PrefillInstruments,
    ) -> None:
        self._shelf = shelf
        self._store = store
        self._model_revision = model_revision
        self._tracer = tracer
        self._instruments = instruments

    async def ReadKv(self, request: pb.ReadKvRequest, context: Context) -> AsyncIterator[pb.ReadKvResponse]:
        order = wire.order_from(request)
        check_model(order.geometry, order.model_revision, self._store.geometry, self._model_revision)
        with await self._shelf.begin_read(order.lease_id, order.epoch, order.reader_id) as read:
            _check_wanted(order, read.offered)
            with span(self._tracer, names.SPAN_PREFILL_READ_KV, parent=read.offered.prompt.traceparent) as read_span:
                read_span.set_attributes(_facts(order, read.offered))
                yield wire.header_of(order, read.offered.prefilled)
                sent = Trailer()
                async for frame in self._frames(order.wanted_blocks, read):
                    sent = sent.plus(frame)
                    yield wire.block_of(frame)
                read_span.set_attribute(names.ATTR_KV_BYTES, sent.num_bytes)
                # Before the trailer leaves: a reader that hangs up on seeing it has everything.
                read.complete()
                self._instruments.kv_sent(sent.num_bytes)
                yield wire.trailer_of(sent)

    async def ReleaseKv(self, request: pb.ReleaseKvRequest, context: Context) -> pb.ReleaseKvResponse:
        acknowledged = wire.is_acknowledged(request)
        self._shelf.release(request.kv_lease_id, request.epoch, request.reader_id, acknowledged=acknowledged)
        return pb.ReleaseKvResponse()

    async def _frames(self, wanted_blocks: tuple[int, ...], read: KvRead) -> AsyncIterator[Frame]:
        prefilled = read.offered.prefilled
        for index in wanted_blocks:
            read.check()
            num_tokens = prefilled.manifest.tokens_in(index)
            # Off the loop: copying and hashing a block may take milliseconds.
            frames = await asyncio.to_thread(self._export, prefilled.blocks[index], index, num_tokens)
            for frame in frames:
                yield _rehearse(frame, read.offered)

    def _export(self, block: int, index: int, num_tokens: int) -> list[Frame]:
        return list(slice_block(index, self._store.export_block(block, num_tokens=num_tokens), self._store.geometry))


def _check_wanted(order: wire.ReadOrder, offered: Offered) -> None:
    num_blocks = len(offered.prefilled.blocks)
    if order.wanted_blocks and order.wanted_blocks[-1] >= num_blocks:
        raise BadInput(
            f"block {order.wanted_blocks[-1]} was wanted, the sequence has {num_blocks}", field="wanted_blocks"
        )


def _facts(order: wire.ReadOrder, offered: Offered) -> dict[str, str | int]:
    return {
        names.ATTR_REQUEST_ID: offered.prompt.key.request_id,
        names.ATTR_EPOCH: order.epoch,
        names.ATTR_KV_LEASE_ID: order.lease_id,
        names.ATTR_KV_BLOCKS: len(order.wanted_blocks),
        names.ATTR_KV_BLOCKS_REUSED: len(offered.prefilled.blocks) - len(order.wanted_blocks),
    }


def _rehearse(frame: Frame, offered: Offered) -> Frame:
    """Test hook `kv:corrupt`: flip one bit of one frame, once, after its checksum was made."""
    fault = offered.prompt.fault
    if not offered.corruption_due or fault is None or not fault.strikes(block=frame.block_index):
        return frame
    offered.corruption_due = False
    return replace(frame, data=bytes([frame.data[0] ^ 1]) + frame.data[1:])
