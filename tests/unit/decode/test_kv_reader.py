"""Reading KV from a real gRPC server on the loopback: what is good arrives bit for bit, the rest is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch

from meshfire.api.prefill.v1 import prefill_service_pb2 as pb
from meshfire.api.prefill.v1 import prefill_service_pb2_grpc as rpc
from meshfire.errors import InvalidTensor, KvCorrupt, KvExpired, ModelMismatch, Unavailable
from meshfire.kv.hashing import chain_hashes
from meshfire.kv.store import KvStore
from meshfire.kv.transfer import KvManifest, Trailer, slice_block
from meshfire.model.interface import KvGeometry
from meshfire.rpc import geometry, tensors
from meshfire.rpc.channels import ChannelPool
from meshfire.rpc.interceptors import ErrorsToStatus
from services.decode.kv_reader import KvReader, KvSource

H = 6
GEOMETRY = KvGeometry(num_layers=3, block_tokens=4, row_width=5)
TOKENS = list(range(10))
BLOCKS = 3
HIDDEN = torch.arange(H, dtype=torch.float32) / 7
Frames = list[pb.ReadKvResponse]
Spoil = Callable[[Frames], Frames]


def manifest(**changes: Any) -> KvManifest:
    hashes = tuple(chain_hashes(TOKENS, GEOMETRY.block_tokens, model_revision="rev"))
    return replace(KvManifest("rev", GEOMETRY, len(TOKENS), hashes), **changes)


def full_store() -> KvStore:
    store = KvStore(GEOMETRY, BLOCKS)
    for layer in range(GEOMETRY.num_layers):
        rows = torch.randn(BLOCKS * GEOMETRY.block_tokens, 5, generator=torch.Generator().manual_seed(layer))
        store.write(layer, torch.arange(len(rows)), rows)
    return store


def frames_of(store: KvStore, request: pb.ReadKvRequest, told: KvManifest) -> Iterator[pb.ReadKvResponse]:
    header = pb.KvHeader(
        kv_lease_id=request.kv_lease_id,
        epoch=request.epoch,
        model_revision=told.model_revision,
        geometry=geometry.to_wire(told.geometry),
        num_tokens=told.num_tokens,
        block_hashes=told.block_hashes,
        last_hidden=tensors.encode(HIDDEN),
    )
    yield pb.ReadKvResponse(header=header)
    sent = Trailer()
    for index in request.wanted_blocks:
        for frame in slice_block(index, store.export_block(index), GEOMETRY):
            sent = sent.plus(frame)
            yield pb.ReadKvResponse(block=pb.KvBlock(**vars(frame)))
    yield pb.ReadKvResponse(trailer=pb.KvTrailer(num_frames=sent.num_frames, num_bytes=sent.num_bytes))


class Owner(rpc.PrefillServiceServicer):
    """A prefill worker whose stream a test may spoil."""

    def __init__(self, spoil: Spoil = lambda frames: frames, *, told: KvManifest | None = None) -> None:
        self.store = full_store()
        self.requests: list[pb.ReadKvRequest] = []
        self.released: list[pb.ReleaseKvRequest] = []
        self.hang = asyncio.Event()
        self.ended = asyncio.Event()
        self.error: Exception | None = None
        self._spoil = spoil
        self._told = told or manifest()

    async def ReadKv(self, request: pb.ReadKvRequest, context: Any) -> AsyncIterator[pb.ReadKvResponse]:
        self.requests.append(request)
        try:
            for frame in self._spoil(list(frames_of(self.store, request, self._told))):
                yield frame
            if self.error is not None:
                raise self.error
            if self.hang.is_set():
                await asyncio.sleep(3600)
        finally:
            self.ended.set()

    async def ReleaseKv(self, request: pb.ReleaseKvRequest, context: Any) -> pb.ReleaseKvResponse:
        self.released.append(request)
        return pb.ReleaseKvResponse()


class Setup:
    def __init__(self, owner: Owner, address: str, channels: ChannelPool, read_timeout_s: float) -> None:
        self.owner = owner
        self.store = KvStore(GEOMETRY, 8)
        self.source = KvSource(address, "kv-1", 3)
        self.reader = KvReader(channels, self.store, reader_id="decode-1", hidden_size=H, read_timeout_s=read_timeout_s)

    async def read(self, block_table: tuple[int, ...] = (6, 2, 5), num_held: int = 0, **changes: Any) -> Any:
        return await self.reader.read(self.source, manifest(**changes), block_table, num_held)


@asynccontextmanager
async def serving(owner: Owner, *, read_timeout_s: float = 20.0) -> AsyncIterator[Setup]:
    server = grpc.aio.server(interceptors=[ErrorsToStatus()])
    rpc.add_PrefillServiceServicer_to_server(owner, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channels = ChannelPool()
    try:
        yield Setup(owner, f"127.0.0.1:{port}", channels, read_timeout_s)
    finally:
        await channels.close()
        await server.stop(0)


async def test_blocks_and_hidden_state_arrive_bit_for_bit() -> None:
    async with serving(Owner()) as setup:
        read = await setup.read()
        assert torch.equal(read.last_hidden, HIDDEN)
        assert read.num_bytes == BLOCKS * GEOMETRY.block_bytes
        for index, block in enumerate((6, 2, 5)):
            assert torch.equal(setup.store.export_block(block), setup.owner.store.export_block(index))


async def test_blocks_that_are_held_are_neither_asked_for_nor_touched() -> None:
    async with serving(Owner()) as setup:
        read = await setup.read(num_held=2)
        assert list(setup.owner.requests[0].wanted_blocks) == [2]
        assert read.num_bytes == GEOMETRY.block_bytes
        assert not setup.store.export_block(6).any()
        assert torch.equal(setup.store.export_block(5), setup.owner.store.export_block(2))


async def test_a_fully_held_prefix_still_brings_the_hidden_state() -> None:
    async with serving(Owner()) as setup:
        read = await setup.read(num_held=3)
        assert read.num_bytes == 0
        assert torch.equal(read.last_hidden, HIDDEN)


async def test_the_request_names_grant_reader_and_model() -> None:
    async with serving(Owner()) as setup:
        await setup.read()
        request = setup.owner.requests[0]
        assert (request.kv_lease_id, request.epoch, request.reader_id) == ("kv-1", 3, "decode-1")
        assert request.model_revision == "rev"
        assert geometry.from_wire(request.geometry) == GEOMETRY


async def test_a_release_says_how_the_read_ended() -> None:
    async with serving(Owner()) as setup:
        await setup.reader.release(setup.source, acknowledged=True)
        await setup.reader.release(setup.source, acknowledged=False)
        outcomes = [one.outcome for one in setup.owner.released]
        assert outcomes == [pb.KV_OUTCOME_ACKNOWLEDGED, pb.KV_OUTCOME_ABANDONED]


async def test_releasing_at_an_owner_that_is_gone_is_no_error() -> None:
    async with serving(Owner()) as setup:
        nobody = replace(setup.source, address="127.0.0.1:1")
        await setup.reader.release(nobody, acknowledged=False)


def corrupt_bit(frames: Frames) -> Frames:
    data = bytearray(frames[1].block.data)
    data[3] ^= 1
    frames[1].block.data = bytes(data)
    return frames


def swapped(frames: Frames) -> Frames:
    frames[1], frames[2] = frames[2], frames[1]
    return frames


def second_header(frames: Frames) -> Frames:
    return [frames[0], frames[0], *frames[1:]]


def other_lease(frames: Frames) -> Frames:
    frames[0].header.kv_lease_id = "kv-2"
    return frames


def miscounted(frames: Frames) -> Frames:
    frames[-1].trailer.num_bytes += 1
    return frames


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (corrupt_bit, "block.checksum"),
        (swapped, "block.block_index"),
        (second_header, "frame"),
        (other_lease, "header.kv_lease_id"),
        (miscounted, "trailer"),
        (lambda frames: frames[:-1], "trailer"),
        (lambda frames: [*frames[:2], frames[-1]], "trailer"),
        (lambda frames: frames[1:], "header"),
        (lambda frames: [], "header"),
    ],
)
async def test_a_stream_that_does_not_verify_is_refused(spoil: Spoil, field: str) -> None:
    async with serving(Owner(spoil)) as setup:
        with pytest.raises(KvCorrupt) as refused:
            await setup.read()
        assert refused.value.field == field
        assert refused.value.retryable


async def test_a_hidden_state_of_another_size_is_refused() -> None:
    def shorten(frames: Frames) -> Frames:
        frames[0].header.last_hidden.CopyFrom(tensors.encode(HIDDEN[:3]))
        return frames

    async with serving(Owner(shorten)) as setup:
        with pytest.raises(InvalidTensor, match="last_hidden"):
            await setup.read()


@pytest.mark.parametrize(
    ("told", "error", "field"),
    [
        ({"model_revision": "other"}, ModelMismatch, "model_revision"),
        ({"geometry": replace(GEOMETRY, num_layers=4)}, ModelMismatch, "geometry.num_layers"),
        ({"num_tokens": 11}, KvCorrupt, "num_tokens"),
        ({"block_hashes": (b"x" * 16,) * 3}, KvCorrupt, "block_hashes[0]"),
    ],
)
async def test_kv_of_something_else_is_refused_before_a_byte_is_taken(
    told: dict[str, Any], error: type[Exception], field: str
) -> None:
    async with serving(Owner(told=manifest(**told))) as setup:
        with pytest.raises(error) as refused:
            await setup.read()
        assert refused.value.field == field  # type: ignore[attr-defined]
        assert not any(setup.store.export_block(block).any() for block in range(8))


async def test_what_the_owner_says_is_raised_as_it_said_it() -> None:
    owner = Owner(lambda frames: frames[:2])
    owner.error = KvExpired("freed meanwhile", metadata={"outcome": "expired"})
    async with serving(owner) as setup:
        with pytest.raises(KvExpired, match="freed meanwhile") as refused:
            await setup.read()
        assert refused.value.metadata == {"outcome": "expired"}


async def test_a_silent_owner_is_given_up() -> None:
    owner = Owner(lambda frames: frames[:2])
    owner.hang.set()
    async with serving(owner, read_timeout_s=0.3) as setup:
        with pytest.raises(Unavailable, match="no KV for"):
            await setup.read()
        await owner.ended.wait()


async def test_an_owner_that_is_gone_is_unavailable() -> None:
    async with serving(Owner()) as setup:
        setup.source = replace(setup.source, address="127.0.0.1:1")
        with pytest.raises(Unavailable):
            await setup.read()


async def test_a_cancelled_read_ends_the_call_at_the_owner() -> None:
    owner = Owner(lambda frames: frames[:2])
    owner.hang.set()
    async with serving(owner) as setup:
        task = asyncio.ensure_future(setup.read())
        while not owner.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await owner.ended.wait()
