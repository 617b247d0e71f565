"""The service over the wire: what it refuses, what it tells of itself, what it traces, how it stops."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
import torch

from meshfire.api.common.v1 import tensor_pb2
from meshfire.api.expert_shard.v1 import expert_shard_service_pb2 as pb
from meshfire.api.expert_shard.v1 import expert_shard_service_pb2_grpc as rpc
from meshfire.errors import Refused, StaleEpoch, UnknownExpert
from meshfire.rpc import tensors
from meshfire.rpc.channels import ChannelPool
from meshfire.telemetry import names
from tests.unit.expert_shard.conftest import HIDDEN, INNER, TinySource, by_shard, calling, step_of

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER_TRACE = "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def request_of(hop_id: int = 1, *, layer: int = 1, epoch: int = 1, num_tokens: int = 3, **changed) -> pb.ForwardRequest:
    hidden, ids, weights = step_of(num_tokens)
    fields = {
        "hidden": tensors.encode(hidden),
        "topk_ids": tensors.encode(ids % 3),
        "topk_weights": tensors.encode(weights),
        **changed,
    }
    return pb.ForwardRequest(hop_id=hop_id, layer=layer, placement_epoch=epoch, **fields)


@asynccontextmanager
async def shard(cluster, **settings):
    """Shard "a" with experts 0 to 2 of 6, and a stub to it."""
    await cluster.place(by_shard({"a": [0, 1, 2], "b": [3, 4, 5]}))
    mesh = await cluster.start("a", epoch_wait_s=0.1, **settings)
    channels = ChannelPool()
    try:
        yield rpc.ExpertShardServiceStub(channels.get(mesh.address))
    finally:
        await channels.close()


async def ask(stream, request: pb.ForwardRequest) -> pb.ForwardResponse:
    await stream.write(request)
    return await stream.read()


def tensor(dtype, shape, data: bytes) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=dtype, shape=shape, data=data)


F32, I32, I64 = tensor_pb2.DATA_TYPE_FLOAT32, tensor_pb2.DATA_TYPE_INT32, tensor_pb2.DATA_TYPE_INT64
ROW = HIDDEN * 4
BROKEN = {
    "hidden one byte short": ({"hidden": tensor(F32, (3, HIDDEN), b"\0" * (3 * ROW - 1))}, "INVALID_TENSOR", "hidden"),
    "hidden one row long": ({"hidden": tensor(F32, (3, HIDDEN), b"\0" * (4 * ROW))}, "INVALID_TENSOR", "hidden"),
    "hidden of another width": ({"hidden": tensor(F32, (3, 4), b"\0" * 48)}, "INVALID_TENSOR", "hidden"),
    "hidden of one dimension": ({"hidden": tensor(F32, (HIDDEN,), b"\0" * ROW)}, "INVALID_TENSOR", "hidden"),
    "hidden of negative size": ({"hidden": tensor(F32, (-3, HIDDEN), b"")}, "INVALID_TENSOR", "hidden"),
    "hidden of huge size": ({"hidden": tensor(F32, (2**62, HIDDEN), b"")}, "INVALID_TENSOR", "hidden"),
    "hidden of integers": ({"hidden": tensor(I64, (3, HIDDEN), b"\0" * 6 * ROW)}, "INVALID_TENSOR", "hidden"),
    "hidden of no type": ({"hidden": tensor(0, (3, HIDDEN), b"\0" * 3 * ROW)}, "INVALID_TENSOR", "hidden"),
    "hidden of an unknown type": ({"hidden": tensor(99, (3, HIDDEN), b"\0" * 3 * ROW)}, "INVALID_TENSOR", "hidden"),
    "no hidden": ({"hidden": None}, "INVALID_TENSOR", "hidden"),
    "no rows": (
        {"hidden": tensor(F32, (0, HIDDEN), b""), "topk_ids": tensor(I32, (0, 3), b""), "topk_weights": None},
        "INVALID_TENSOR",
        "topk_weights",
    ),
    "ids of other rows": ({"topk_ids": tensor(I32, (2, 3), b"\0" * 24)}, "INVALID_TENSOR", "topk_ids"),
    "ids of 64 bits": ({"topk_ids": tensor(I64, (3, 3), b"\0" * 72)}, "INVALID_TENSOR", "topk_ids"),
    "no ids": ({"topk_ids": None}, "INVALID_TENSOR", "topk_ids"),
    "weights of other columns": ({"topk_weights": tensor(F32, (3, 2), b"\0" * 24)}, "INVALID_TENSOR", "topk_weights"),
    "an id beyond the model": ({"topk_ids": tensors.encode(torch.full((3, 3), 6).int())}, "BAD_INPUT", "topk_ids"),
    "an id below -1": ({"topk_ids": tensors.encode(torch.full((3, 3), -2).int())}, "BAD_INPUT", "topk_ids"),
    "an expert of another shard": (
        {"topk_ids": tensors.encode(torch.full((3, 3), 4).int())},
        "UNKNOWN_EXPERT",
        "topk_ids",
    ),
    "a layer without experts": ({"layer": 0}, "BAD_INPUT", "layer"),
    "a layer beyond the model": ({"layer": 3}, "BAD_INPUT", "layer"),
    "a negative layer": ({"layer": -1}, "BAD_INPUT", "layer"),
    "NaN": ({"hidden": tensors.encode(torch.full((3, HIDDEN), torch.nan))}, "NON_FINITE_VALUE", "hidden"),
    "infinity": ({"hidden": tensors.encode(torch.full((3, HIDDEN), torch.inf))}, "NON_FINITE_VALUE", "hidden"),
    "a weight of NaN": ({"topk_weights": tensors.encode(torch.full((3, 3), torch.nan))}, "NON_FINITE_VALUE", "hidden"),
    "an old epoch": ({"epoch": 0}, "STALE_EPOCH", None),
    "an epoch that never comes": ({"epoch": 9}, "STALE_EPOCH", None),
}


async def test_each_malformed_hop_gets_its_own_error_and_the_stream_goes_on(cluster):
    async with shard(cluster) as stub:
        stream = stub.Forward()
        good = await ask(stream, request_of())
        assert good.WhichOneof("result") == "output"
        for hop_id, (what, (changed, reason, field)) in enumerate(BROKEN.items(), start=2):
            answer = await ask(stream, request_of(hop_id, **changed))
            assert (what, answer.hop_id, answer.error.reason) == (what, hop_id, reason)
            assert answer.error.message
            if field:
                assert answer.error.metadata["field"].startswith(field), what
        again = await ask(stream, request_of())
        assert again.output == good.output
        stream.cancel()


async def test_hops_sent_at_once_are_answered_in_order(cluster):
    async with shard(cluster, max_queued_hops=2) as stub:
        stream = stub.Forward()
        for hop_id in range(1, 21):
            await stream.write(request_of(hop_id))
        await stream.done_writing()
        assert [answer.hop_id async for answer in stream] == list(range(1, 21))


async def test_bfloat16_hidden_states_count_as_the_float32_they_stand_for(cluster):
    hidden = step_of(3)[0].bfloat16()
    async with shard(cluster) as stub:
        stream = stub.Forward()
        narrow = await ask(stream, request_of(hidden=tensors.encode(hidden)))
        wide = await ask(stream, request_of(hidden=tensors.encode(hidden.float())))
        assert narrow.output == wide.output
        stream.cancel()


async def test_a_shard_describes_what_it_holds(cluster):
    async with shard(cluster) as stub:
        about = await stub.DescribeShard(pb.DescribeShardRequest())
        assert (about.shard_id, about.model, about.model_revision, about.hidden_size) == ("a", "tiny", "r1", HIDDEN)
        assert list(about.placement_epochs) == [1]
        assert [(one.layer, one.first, one.count) for one in about.experts] == [(1, 0, 3), (2, 0, 3)]
        assert about.weight_bytes >= 6 * 3 * INNER * HIDDEN * 4


async def test_load_is_counted_per_expert(cluster):
    async with shard(cluster) as stub:
        stream = stub.Forward()
        ids = torch.tensor([[0, 2, -1], [2, -1, -1]], dtype=torch.int32)
        weights = tensors.encode(torch.ones(2, 3))
        await ask(stream, request_of(num_tokens=2, topk_ids=tensors.encode(ids), topk_weights=weights))
        stream.cancel()
        loads = (await stub.ReadLoad(pb.ReadLoadRequest())).loads
        assert [(one.layer, one.expert, one.num_tokens) for one in loads] == [(1, 0, 1), (1, 2, 2)]


async def test_experts_loaded_for_a_coming_epoch_are_served_beside_the_old_one(cluster):
    async with shard(cluster) as stub:
        stream = stub.Forward()
        wanted = [pb.ExpertRange(layer=1, first=3, count=1)]
        before = (await stub.DescribeShard(pb.DescribeShardRequest())).weight_bytes
        after = (await stub.LoadExperts(pb.LoadExpertsRequest(placement_epoch=2, experts=wanted))).weight_bytes
        assert after * 6 == before * 7
        fourth = tensors.encode(torch.full((3, 3), 3).int())
        assert (await ask(stream, request_of(epoch=2, topk_ids=fourth))).HasField("output")
        assert (await ask(stream, request_of(epoch=1))).HasField("output")
        stream.cancel()


async def test_experts_are_dropped_only_when_no_served_epoch_needs_them(cluster):
    async with shard(cluster) as stub:
        third = [pb.ExpertRange(layer=1, first=2, count=1)]
        await cluster.place(by_shard({"a": [0, 1], "b": [2, 3, 4, 5]}, epoch=2))
        while list((await stub.DescribeShard(pb.DescribeShardRequest())).placement_epochs) != [1, 2]:
            await asyncio.sleep(0.01)
        with pytest.raises(Refused):
            await stub.UnloadExperts(pb.UnloadExpertsRequest(oldest_epoch=1, experts=third))
        before = (await stub.DescribeShard(pb.DescribeShardRequest())).weight_bytes
        after = (await stub.UnloadExperts(pb.UnloadExpertsRequest(oldest_epoch=2, experts=third))).weight_bytes
        assert after * 6 == before * 5
        stream = stub.Forward()
        assert (await ask(stream, request_of(epoch=1))).error.reason == "STALE_EPOCH"
        stream.cancel()


async def test_a_load_for_an_old_epoch_or_of_no_expert_is_refused(cluster):
    async with shard(cluster) as stub:
        with pytest.raises(StaleEpoch):
            await stub.LoadExperts(pb.LoadExpertsRequest(placement_epoch=0))
        for span in [(0, 0, 1), (1, 5, 2), (1, -1, 1), (9, 0, 1), (1, 0, 2**31 - 1)]:
            one = pb.ExpertRange(layer=span[0], first=span[1], count=span[2])
            with pytest.raises(UnknownExpert):
                await stub.LoadExperts(pb.LoadExpertsRequest(placement_epoch=2, experts=[one]))


async def test_two_epochs_are_served_and_the_third_ends_the_first(cluster):
    async with shard(cluster) as stub:
        stream = stub.Forward()
        for epoch in (2, 3):
            await cluster.place(by_shard({"a": [0, 1, 2], "b": [3, 4, 5]}, epoch=epoch))
            assert (await ask(stream, request_of(epoch=epoch))).HasField("output")
        assert (await ask(stream, request_of(epoch=2))).HasField("output")
        assert (await ask(stream, request_of(epoch=1))).error.reason == "STALE_EPOCH"
        stream.cancel()


async def test_a_broken_placement_changes_nothing(cluster):
    async with shard(cluster) as stub:
        await cluster.put_document(b"{broken")
        other = by_shard({"a": range(6)}, epoch=2).to_json().replace(b'"r1"', b'"r2"')
        await cluster.put_document(other)
        stream = stub.Forward()
        assert (await ask(stream, request_of())).HasField("output")
        assert list((await stub.DescribeShard(pb.DescribeShardRequest())).placement_epochs) == [1]
        stream.cancel()


def spans_of(cluster):
    return {one.context.trace_id: one for one in cluster.spans.get_finished_spans()}


async def test_a_traced_request_is_one_span_over_all_its_hops(cluster):
    async with shard(cluster) as stub:
        stream = stub.Forward()
        for hop_id in (1, 2, 3):
            await ask(stream, request_of(hop_id, traceparents=[TRACE] if hop_id < 3 else [TRACE, OTHER_TRACE]))
        await ask(stream, request_of(4, finished_traceparents=[TRACE]))
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
    await cluster.stop("a")
    found = spans_of(cluster)
    traced, other = (found[int(one.split("-")[1], 16)] for one in (TRACE, OTHER_TRACE))
    assert (traced.name, traced.parent.span_id) == ("expert_shard.forward", 0xB7AD6B7169203331)
    said = traced.attributes
    assert said[names.ATTR_SHARD_ID] == "a"
    assert (said[names.ATTR_EXPERT_HOPS], said[names.ATTR_EXPERT_TOKENS]) == (3, 9)
    assert (said[names.ATTR_EXPERT_BYTES_IN], said[names.ATTR_EXPERT_BYTES_OUT]) == (9 * ROW, 2 * 9 * ROW)
    assert said[names.ATTR_EXPERT_COMPUTE_MS] > 0
    assert traced.start_time < traced.end_time
    assert other.attributes[names.ATTR_EXPERT_HOPS] == 1


async def test_a_request_that_only_closes_traces_is_not_answered(cluster):
    async with shard(cluster) as stub:
        stream = stub.Forward()
        await stream.write(pb.ForwardRequest(hop_id=1, finished_traceparents=[TRACE]))
        assert (await ask(stream, request_of(2))).hop_id == 2
        stream.cancel()


async def test_a_silent_trace_is_closed_while_its_stream_stays_open(cluster):
    async with shard(cluster, span_silence_s=0.05) as stub:
        stream = stub.Forward()
        await ask(stream, request_of(traceparents=[TRACE]))
        while not spans_of(cluster):
            await asyncio.sleep(0.05)
        stream.cancel()


async def test_the_caller_side_names_its_finished_traces(cluster):
    await cluster.place(by_shard({"a": range(6)}))
    await cluster.start("a", span_silence_s=60)
    async with calling(cluster) as caller:
        await caller.experts.ready()
        await caller.forward(1, step_of(3), caller.session(traceparents=[TRACE]))
        caller.experts.finish([TRACE])
        while not spans_of(cluster):
            await asyncio.sleep(0.05)
    [span] = cluster.spans.get_finished_spans()
    assert span.attributes[names.ATTR_CALLER_ID] == "decode-0"


async def test_a_draining_shard_answers_what_it_has_and_takes_no_new_stream(cluster):
    async with shard(cluster) as stub:
        stream = stub.Forward()
        await ask(stream, request_of())
        stopping = asyncio.ensure_future(cluster.stop("a"))
        assert await stream.read() is grpc.aio.EOF
        await stopping


async def test_the_experts_of_the_settings_are_held_before_any_placement(cluster):
    source = TinySource()
    await cluster.start("a", source=source, experts="1:2-3, 2:5-9")
    assert source.read == [(1, 2), (1, 3), (2, 5)]
    await cluster.place(by_shard({"a": [0], "b": [1, 2, 3, 4, 5]}))
    while (2, 0) not in source.read:
        await asyncio.sleep(0.01)
    assert source.read == [(1, 2), (1, 3), (2, 5), (1, 0), (2, 0)]


@pytest.mark.parametrize("text", ["1", "1:2", "1:3-2", "x:1-2", "1:1-2;2:1-2", "1:-1-2"])
async def test_expert_ranges_that_mean_nothing_are_refused_at_the_start(cluster, text):
    with pytest.raises(ValueError, match="experts"):
        await cluster.start("a", experts=text)
