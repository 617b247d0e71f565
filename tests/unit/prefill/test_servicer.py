"""ReadKv and ReleaseKv over a real gRPC connection, good and bad."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import grpc.aio
import pytest
import torch

from meshfire.api.prefill.v1 import prefill_service_pb2 as pb
from meshfire.api.prefill.v1.prefill_service_pb2_grpc import PrefillServiceStub, add_PrefillServiceServicer_to_server
from meshfire.errors import BadInput, KvCorrupt, KvExpired, KvNotGranted, ModelMismatch, StaleEpoch
from meshfire.kv.hashing import chain_hashes
from meshfire.kv.lease import LeaseState, OwnerReleased, TimedOut
from meshfire.kv.transfer import Frame, FrameAssembler, Trailer
from meshfire.rpc import geometry as geometry_codec
from meshfire.rpc import tensors
from meshfire.rpc.channels import ChannelPool
from meshfire.rpc.interceptors import ErrorsToStatus
from meshfire.telemetry import names
from services.prefill.servicer import PrefillServicer
from tests.unit.prefill.conftest import NUM_BLOCKS, Worker
from tests.unit.prefill.fakes import GEOMETRY, expected_hidden, expected_row, lease_of, until

PROMPT = list(range(1, 15))
READER = "decode-1"


@dataclass
class Peer:
    """A reader with a connection, and an offered KV to read."""

    worker: Worker
    stub: PrefillServiceStub
    lease_id: str = ""

    def request(self, **changes: object) -> pb.ReadKvRequest:
        request = pb.ReadKvRequest(
            kv_lease_id=self.lease_id,
            epoch=1,
            reader_id=READER,
            wanted_blocks=[0, 1, 2, 3],
            geometry=geometry_codec.to_wire(GEOMETRY),
            model_revision="rev",
        )
        request.MergeFrom(pb.ReadKvRequest(**changes))  # type: ignore[arg-type]
        return request

    async def read(self, request: pb.ReadKvRequest) -> list[pb.ReadKvResponse]:
        return [response async for response in self.stub.ReadKv(request, timeout=10)]

    async def release(self, outcome: int, **changes: object) -> None:
        fields: dict[str, object] = {"kv_lease_id": self.lease_id, "epoch": 1, "reader_id": READER, "outcome": outcome}
        await self.stub.ReleaseKv(pb.ReleaseKvRequest(**{**fields, **changes}), timeout=10)  # type: ignore[arg-type]

    @property
    def state(self) -> LeaseState | None:
        offered = self.worker.shelf._offered.get(self.lease_id)
        return offered.lease.state if offered else None


@pytest.fixture
async def peer(worker: Worker) -> AsyncIterator[Peer]:
    server = grpc.aio.server(interceptors=[ErrorsToStatus()])
    servicer = PrefillServicer(worker.shelf, worker.store, "rev", worker.telemetry.tracer, worker.instruments)
    add_PrefillServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channels = ChannelPool()
    try:
        yield Peer(worker, PrefillServiceStub(channels.get(f"127.0.0.1:{port}")))
    finally:
        await channels.close()
        await server.stop(None)


async def offer(peer: Peer, *, grant: bool = True, **changes: object) -> Peer:
    peer.worker.engine.on_lease("router-1", lease_of(PROMPT, **changes))
    peer.lease_id = (await peer.worker.link.message()).kv_offer.kv_lease_id
    if grant:
        peer.worker.shelf.grant(peer.lease_id, 1, READER)
    return peer


def assemble(responses: list[pb.ReadKvResponse], wanted: list[int]) -> torch.Tensor:
    """What a reader would import: the wanted blocks' rows [L, tokens, W]. Raises KvCorrupt."""
    assembler = FrameAssembler(GEOMETRY, wanted)
    for response in responses[1:-1]:
        block = response.block
        rows = assembler.add(Frame(block.block_index, block.layer_start, block.num_layers, block.data, block.checksum))
    trailer = responses[-1].trailer
    assembler.finish(Trailer(trailer.num_frames, trailer.num_bytes))
    return rows


async def test_a_granted_reader_gets_header_blocks_and_trailer_and_acknowledges(peer: Peer) -> None:
    peer.worker.store._blocks.fill_(9)  # what earlier sequences left behind must not travel
    await offer(peer)
    responses = await peer.read(peer.request())
    header = responses[0].header
    assert (header.kv_lease_id, header.epoch, header.model_revision, header.num_tokens) == (peer.lease_id, 1, "rev", 14)
    assert geometry_codec.from_wire(header.geometry) == GEOMETRY
    assert list(header.block_hashes) == chain_hashes(PROMPT, 4, model_revision="rev")
    assert tensors.decode(header.last_hidden, field="last_hidden").tolist() == expected_hidden(PROMPT)
    assembler = FrameAssembler(GEOMETRY, range(4))
    seen: dict[int, list[torch.Tensor]] = {}
    for one in (response.block for response in responses[1:-1]):
        frame = Frame(one.block_index, one.layer_start, one.num_layers, one.data, one.checksum)
        seen.setdefault(one.block_index, []).append(assembler.add(frame))
    assembler.finish(Trailer(responses[-1].trailer.num_frames, responses[-1].trailer.num_bytes))
    rows = torch.cat([torch.cat(layers) for _, layers in sorted(seen.items())], dim=1)
    for layer in range(GEOMETRY.num_layers):
        expected = [expected_row(layer, token, position) for position, token in enumerate(PROMPT)]
        assert rows[layer].tolist() == [*expected, [0.0, 0.0], [0.0, 0.0]]
    assert peer.state is LeaseState.READING
    await peer.release(pb.KV_OUTCOME_ACKNOWLEDGED)
    assert peer.state is None
    assert peer.worker.all_blocks_are_free()
    assert peer.worker.pool.num_cached == 3


async def test_only_wanted_blocks_travel(peer: Peer) -> None:
    await offer(peer)
    request = peer.request()
    request.wanted_blocks[:] = [1, 3]
    responses = await peer.read(request)
    assert [response.block.block_index for response in responses[1:-1]] == [1, 3]
    assert responses[-1].trailer.num_bytes == 2 * GEOMETRY.block_bytes
    peer.worker.telemetry.flush()
    (span,) = [one for one in peer.worker.spans.get_finished_spans() if one.name == names.SPAN_PREFILL_READ_KV]
    assert span.attributes[names.ATTR_KV_BYTES] == 2 * GEOMETRY.block_bytes
    assert span.attributes[names.ATTR_KV_BLOCKS_REUSED] == 2


async def test_a_reader_that_holds_all_blocks_still_gets_the_last_hidden_state(peer: Peer) -> None:
    await offer(peer)
    request = peer.request()
    del request.wanted_blocks[:]
    responses = await peer.read(request)
    assert [response.WhichOneof("frame") for response in responses] == ["header", "trailer"]
    assert responses[0].header.last_hidden.data


async def test_a_reader_that_overtakes_its_grant_waits_for_it(peer: Peer) -> None:
    peer.worker.shelf._grant_wait_s = 10
    await offer(peer, grant=False)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(peer.read(peer.request()))
        await asyncio.sleep(0.02)
        assert not reading.done()
        peer.worker.shelf.grant(peer.lease_id, 1, READER)
    assert reading.result()[-1].HasField("trailer")


async def test_a_reader_whose_grant_never_comes_is_refused(peer: Peer) -> None:
    await offer(peer, grant=False)
    with pytest.raises(KvNotGranted):
        await peer.read(peer.request())
    assert peer.state is LeaseState.OFFERED


async def test_an_offer_that_ends_while_its_reader_waits_for_the_grant_is_gone(peer: Peer) -> None:
    peer.worker.shelf._grant_wait_s = 10
    await offer(peer, grant=False)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(_error_of(peer, peer.request()))
        await asyncio.sleep(0.02)
        peer.worker.engine.on_cancel("router-1", "r1", 1)
    assert isinstance(reading.result(), KvExpired)


async def _error_of(peer: Peer, request: pb.ReadKvRequest) -> Exception | None:
    try:
        await peer.read(request)
    except Exception as error:
        return error
    return None


def other_geometry(**changes: int) -> dict[str, object]:
    return {"geometry": geometry_codec.to_wire(replace(GEOMETRY, **changes))}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"kv_lease_id": "unknown"}, KvExpired),
        ({"reader_id": "decode-2"}, KvNotGranted),
        ({"epoch": 7}, KvNotGranted),
        ({"model_revision": "other"}, ModelMismatch),
        (other_geometry(num_layers=4), ModelMismatch),
        (other_geometry(block_tokens=8), ModelMismatch),
        (other_geometry(row_width=3), ModelMismatch),
        ({"wanted_blocks": [4]}, BadInput),
        ({"wanted_blocks": [2]}, BadInput),
    ],
)
async def test_a_reader_that_has_no_right_to_it_gets_nothing_and_the_lease_stays_as_it_was(
    peer: Peer, changes: dict[str, object], error: type[Exception]
) -> None:
    await offer(peer)
    with pytest.raises(error):
        await peer.read(peer.request(**changes))
    assert peer.state is LeaseState.GRANTED
    assert (await peer.read(peer.request()))[-1].HasField("trailer")


async def test_a_reader_of_an_older_epoch_is_stale(peer: Peer) -> None:
    await offer(peer)
    peer.worker.shelf.grant(peer.lease_id, 2, "decode-2")
    with pytest.raises(StaleEpoch):
        await peer.read(peer.request())
    with pytest.raises(StaleEpoch):
        await peer.release(pb.KV_OUTCOME_ACKNOWLEDGED)
    assert peer.state is LeaseState.GRANTED


@pytest.mark.parametrize("negative", [[-1], [0, 0], [2, 1]])
async def test_block_lists_that_are_not_ascending_are_bad_input(peer: Peer, negative: list[int]) -> None:
    await offer(peer)
    request = peer.request()
    request.wanted_blocks[:] = negative
    with pytest.raises(BadInput) as caught:
        await peer.read(request)
    assert caught.value.field == "wanted_blocks"


async def test_releasing_twice_or_something_unknown_is_no_error(peer: Peer) -> None:
    await offer(peer)
    await peer.read(peer.request())
    await peer.release(pb.KV_OUTCOME_ACKNOWLEDGED)
    await peer.release(pb.KV_OUTCOME_ACKNOWLEDGED)
    await peer.release(pb.KV_OUTCOME_ABANDONED, kv_lease_id="unknown")
    assert peer.worker.all_blocks_are_free()


async def test_a_release_without_an_outcome_is_bad_input(peer: Peer) -> None:
    await offer(peer)
    with pytest.raises(BadInput) as caught:
        await peer.release(pb.KV_OUTCOME_UNSPECIFIED)
    assert caught.value.field == "outcome"


async def test_a_reader_that_gives_up_frees_the_blocks(peer: Peer) -> None:
    await offer(peer)
    await peer.release(pb.KV_OUTCOME_ABANDONED)
    assert peer.worker.all_blocks_are_free()
    with pytest.raises(KvExpired):
        await peer.read(peer.request())


async def test_a_read_that_breaks_off_may_be_repeated_by_the_same_reader(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = asyncio.Event()
    whole_export = PrefillServicer._frames

    async def slow_frames(self, wanted, read):  # type: ignore[no-untyped-def]
        async for frame in whole_export(self, wanted, read):
            yield frame
            await hold.wait()

    monkeypatch.setattr(PrefillServicer, "_frames", slow_frames)
    await offer(peer)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(peer.read(peer.request()))
        await until(lambda: peer.state is LeaseState.READING)
        reading.cancel()
    await until(lambda: peer.state is LeaseState.GRANTED)
    monkeypatch.undo()
    assert (await peer.read(peer.request()))[-1].HasField("trailer")


async def test_a_reader_that_stops_reading_and_hangs_up_ends_its_read(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_sent = 0

    async def endless_frames(self, wanted, read):  # type: ignore[no-untyped-def]
        nonlocal num_sent
        while True:
            num_sent += 1
            yield Frame(0, 0, 1, bytes(1 << 20), b"")

    monkeypatch.setattr(PrefillServicer, "_frames", endless_frames)
    await offer(peer)
    call = peer.stub.ReadKv(peer.request(), timeout=60)
    await anext(aiter(call))
    await until(lambda: num_sent > 0)
    await asyncio.sleep(0.05)  # the transport's window fills: the servicer waits in a write, not in its own code
    call.cancel()
    await until(lambda: peer.state is LeaseState.GRANTED)


@pytest.mark.parametrize("event", [OwnerReleased(), TimedOut(float("inf"))])
async def test_blocks_stay_until_the_read_that_lost_its_lease_has_ended(
    peer: Peer, event: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, entered = asyncio.Event(), asyncio.Event()
    whole_export = PrefillServicer._frames

    async def held_frames(self, wanted, read):  # type: ignore[no-untyped-def]
        entered.set()
        await hold.wait()
        async for frame in whole_export(self, wanted, read):
            yield frame

    monkeypatch.setattr(PrefillServicer, "_frames", held_frames)
    await offer(peer)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(_error_of(peer, peer.request()))
        await asyncio.wait_for(entered.wait(), 10)
        peer.worker.shelf.step(peer.worker.shelf._offered[peer.lease_id], event)  # type: ignore[arg-type]
        assert len(peer.worker.shelf) == 0
        assert peer.worker.pool.num_free == NUM_BLOCKS - 4
        hold.set()
    assert isinstance(reading.result(), KvExpired)
    await until(peer.worker.all_blocks_are_free)
    assert peer.worker.link.credits[-1] == (2, NUM_BLOCKS)


async def test_a_rehearsed_corruption_damages_one_frame_once(peer: Peer) -> None:
    await offer(peer, fault="kv:corrupt@block=2")
    damaged = await peer.read(peer.request())
    with pytest.raises(KvCorrupt) as caught:
        assemble(damaged, [0, 1, 2, 3])
    assert "block 2" in caught.value.message
    peer.worker.shelf._offered[peer.lease_id].lease = replace(
        peer.worker.shelf._offered[peer.lease_id].lease, state=LeaseState.GRANTED
    )
    assemble(await peer.read(peer.request()), [0, 1, 2, 3])
