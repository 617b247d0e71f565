"""Lanes to a shard: what differs from the stream, who is held up by whom, and when the stream has to serve."""

import asyncio
import time

import pytest
import torch

from meshfire.errors import ShardUnavailable, TestHooksOff
from meshfire.model.experts import LocalExperts
from meshfire.rpc import lane_frame, lane_socket, tensors
from meshfire.rpc.lane_frame import Frame, Kind
from meshfire.telemetry import names
from meshfire.worker import hop_lane
from meshfire.worker.faults import HopFault, parse_fault
from tests.unit.expert_shard.conftest import HIDDEN, TinySource, by_shard, calling, step_of

pytestmark = pytest.mark.skipif(not lane_socket.SUPPORTED, reason="needs Linux's abstract sockets")

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def expected_of(step):
    return LocalExperts(TinySource()).dispatch(1, *step).result()


async def local_socket_of(cluster, shard_id: str) -> str:
    """The name under which a running shard listens, found as a caller finds it."""
    found = []
    connect = hop_lane.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hop_lane, "connect", lambda name: found.append(name) or connect(name))
        async with calling(cluster, transport="local") as caller:
            await caller.experts.ready()
    return found[0]


def hop_frame(hop_id: int, num_tokens: int = 3) -> Frame:
    parts = step_of(num_tokens)
    return Frame(Kind.HOP, hop_id, 1, 1, tensors=[(tensors.wire_of(one), one) for one in parts])


async def test_hops_travel_over_the_lane_and_nothing_over_the_stream(cluster):
    await cluster.place(by_shard({"a": range(6)}))
    wire = await cluster.wire(await cluster.start("a"))
    step = step_of(5)
    async with calling(cluster, transport="local") as caller:
        await caller.experts.ready()
        wire.freeze_streams()
        for _ in range(3):
            assert torch.equal(await caller.forward(1, step), expected_of(step))


async def test_a_shard_without_a_local_socket_is_asked_over_the_stream_unless_it_must_be_local(cluster):
    await cluster.place(by_shard({"a": range(6)}))
    await cluster.start("a", hop_transport="grpc")
    step = step_of(5)
    async with calling(cluster, transport="auto") as caller:
        await caller.experts.ready()
        assert torch.equal(await caller.forward(1, step), expected_of(step))
    async with calling(cluster, transport="local") as caller:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await caller.experts.ready()
        assert caller.experts.shards == {"a": False}


async def test_a_socket_out_of_reach_leaves_the_stream(cluster, monkeypatch):
    def refuse(name: str) -> None:
        raise ShardUnavailable("its local socket is out of reach: another namespace")

    monkeypatch.setattr(hop_lane, "connect", refuse)
    await cluster.place(by_shard({"a": range(6)}))
    await cluster.start("a")
    step = step_of(5)
    async with calling(cluster) as caller:
        await caller.experts.ready()
        assert torch.equal(await caller.forward(1, step), expected_of(step))


async def test_a_lost_lane_costs_no_hop_and_is_opened_again(cluster):
    await cluster.place(by_shard({"a": range(6)}))
    await cluster.start("a")
    step = step_of(5)
    async with calling(cluster) as caller:
        await caller.experts.ready()
        [link] = caller.experts._peers.links
        first = link.lane
        session = caller.session()

        def lose_it_under_way():
            pending = session.dispatch(1, *step)
            first.shut()
            return pending.result()

        assert torch.equal(await caller.thread.run(lose_it_under_way), expected_of(step))
        assert link.lane is not first
        assert not link.lane.broken
        assert torch.equal(await caller.forward(1, step), expected_of(step))


async def test_half_a_frame_and_a_caller_that_never_reads_hold_nobody_up(cluster):
    await cluster.place(by_shard({"a": range(6)}))
    await cluster.start("a")
    name = await local_socket_of(cluster, "a")
    half, deaf = lane_socket.connect(name), lane_socket.connect(name)
    half.send(Frame(Kind.HELLO, text=b"half"))
    half._socket.send(bytes(lane_frame.pack(hop_frame(1))[0])[:40])
    deaf.send(Frame(Kind.HELLO, text=b"deaf"))
    hop_id = 0
    while not deaf.is_choked:
        hop_id += 1
        deaf.send(hop_frame(hop_id, num_tokens=200))
        await asyncio.sleep(0)
    step = step_of(5)
    async with calling(cluster, transport="local") as caller:
        await caller.experts.ready()
        for _ in range(5):
            assert torch.equal(await caller.forward(1, step), expected_of(step))
    answered = []
    while len(answered) < hop_id:
        deaf.flush()
        frame = deaf.receive()
        if frame is None:
            await asyncio.sleep(0.005)
        else:
            answered.append(frame.hop_id)
    assert answered == list(range(1, hop_id + 1))


async def test_a_stranger_ends_its_own_lane_only(cluster):
    await cluster.place(by_shard({"a": range(6)}))
    await cluster.start("a")
    name = await local_socket_of(cluster, "a")
    for first in (hop_frame(1), Frame(Kind.OUTPUT, 1)):  # no HELLO before
        stranger = lane_socket.connect(name)
        stranger.send(first)
        while not stranger.broken:
            assert stranger.receive() is None
            await asyncio.sleep(0.005)
    step = step_of(5)
    async with calling(cluster, transport="local") as caller:
        await caller.experts.ready()
        assert torch.equal(await caller.forward(1, step), expected_of(step))


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        (step_of(3)[:2], None),
        ((torch.zeros(3, HIDDEN + 1), *step_of(3)[1:]), "hidden.shape"),
        ((step_of(3)[0].double().long(), *step_of(3)[1:]), "hidden.dtype"),
        ((step_of(3)[0], step_of(2)[1], step_of(3)[2]), "topk_ids.shape"),
        ((step_of(3)[0], step_of(3)[1], step_of(3, top_k=2)[2]), "topk_weights.shape"),
        ((torch.zeros(0, HIDDEN), torch.zeros(0, 3).int(), torch.zeros(0, 3)), "topk_ids.shape"),
    ],
)
async def test_a_bad_hop_is_refused_alone_with_its_field(cluster, parts, field):
    await cluster.place(by_shard({"a": range(6)}))
    await cluster.start("a")
    lane = lane_socket.connect(await local_socket_of(cluster, "a"))
    lane.send(Frame(Kind.HELLO, text=b"me"))
    lane.send(Frame(Kind.HOP, 7, 1, 1, tensors=[(tensors.wire_of(one), one) for one in parts]))
    lane.send(hop_frame(8))
    answers = {}
    while len(answers) < 2:
        if (frame := lane.receive()) is not None:
            answers[frame.hop_id] = frame
        await asyncio.sleep(0.001)
    said = lane_frame_error(answers[7])
    assert (said.reason, said.metadata.get("field")) == ("INVALID_TENSOR", field)
    assert answers[8].kind is Kind.OUTPUT


def lane_frame_error(frame: Frame):
    from meshfire.api.expert_shard.v1 import expert_shard_service_pb2 as pb

    assert frame.kind is Kind.ERROR
    return pb.ForwardError.FromString(frame.text)


async def test_faults_are_rehearsed_on_a_lane_only_with_hooks(cluster):
    await cluster.place(by_shard({"a": range(6), "b-1": range(6)}))
    step = step_of(5)
    fault = parse_fault("expert:delay=300ms")
    await cluster.start("a")
    async with calling(cluster, transport="local") as caller:
        await cluster.start("b-1", test_hooks=True)
        await caller.experts.ready()
        await cluster.stop("b-1")
        while caller.experts.shards["b-1"]:
            await asyncio.sleep(0.01)
        with pytest.raises(TestHooksOff):
            await caller.forward(1, step, caller.experts.session(deadline=time.monotonic() + 9, fault=HopFault(fault)))
        assert torch.equal(await caller.forward(1, step), expected_of(step))
        await cluster.start("b-1", test_hooks=True)
        await cluster.stop("a")
        while caller.experts.shards != {"a": False, "b-1": True}:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        session = caller.experts.session(deadline=time.monotonic() + 9, fault=HopFault(fault))
        assert torch.equal(await caller.forward(1, step, session), expected_of(step))
        assert time.monotonic() - began >= 0.3


async def test_a_trace_has_one_span_of_all_its_hops_on_a_lane(cluster):
    await cluster.place(by_shard({"a": range(6)}))
    await cluster.start("a", span_silence_s=60)
    async with calling(cluster, transport="local") as caller:
        await caller.experts.ready()
        session = caller.session(traceparents=[TRACE])
        for layer in (1, 2, 1):
            await caller.forward(layer, step_of(4), session)
        caller.experts.finish([TRACE])
        while not (spans := cluster.spans.get_finished_spans()):
            await asyncio.sleep(0.01)
        [span] = spans
        assert span.attributes[names.ATTR_EXPERT_HOPS] == 3
        assert span.attributes[names.ATTR_EXPERT_TOKENS] == 12
        assert span.attributes[names.ATTR_CALLER_ID] == "decode-0"
        assert span.attributes[names.ATTR_EXPERT_BYTES_IN] == 12 * HIDDEN * 4
        assert span.attributes[names.ATTR_EXPERT_BYTES_OUT] == 12 * HIDDEN * 8
        assert span.attributes[names.ATTR_EXPERT_COMPUTE_MS] > 0
        stats = session.stats["a"]
        assert stats.wait_ns >= stats.compute_ns > 0
        assert (stats.hops, stats.tokens, stats.bytes_out, stats.bytes_in) == (3, 12, 12 * HIDDEN * 4, 12 * HIDDEN * 8)


async def test_an_answer_that_was_there_first_costs_no_wait_afterwards(cluster):
    await cluster.place(by_shard({"a": range(6)}))
    await cluster.start("a")
    async with calling(cluster, transport="local") as caller:
        await caller.experts.ready()
        session = caller.session()

        def late() -> None:
            pending = session.dispatch(1, *step_of(4))
            time.sleep(0.5)
            pending.result()

        await caller.thread.run(late)
        stats = session.stats["a"]
        assert stats.compute_ns <= stats.wait_ns < 500_000_000


async def test_a_hop_of_an_epoch_that_the_shard_has_yet_to_hear_of_waits_for_it(cluster):
    await cluster.place(by_shard({"a": range(6)}))
    await cluster.start("a", epoch_wait_s=10)
    lane = lane_socket.connect(await local_socket_of(cluster, "a"))
    lane.send(Frame(Kind.HELLO, text=b"me"))
    ahead = hop_frame(1)
    ahead.epoch = 2
    lane.send(ahead)
    lane.send(hop_frame(2))
    answered = []
    while not answered:
        if (frame := lane.receive()) is not None:
            answered.append(frame.hop_id)
        await asyncio.sleep(0.001)
    await cluster.place(by_shard({"a": range(6)}, epoch=2))
    while len(answered) < 2:
        if (frame := lane.receive()) is not None:
            assert frame.kind is Kind.OUTPUT
            answered.append(frame.hop_id)
        await asyncio.sleep(0.001)
    assert answered == [2, 1]
