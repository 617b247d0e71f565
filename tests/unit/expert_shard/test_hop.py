"""A caller and real shard servers over loopback: right sums, whatever the placement and whoever dies."""

import asyncio
import threading
import time

import pytest
import torch

from meshfire.errors import BadInput, DeadlineExceeded, ModelMismatch, NonFiniteValue, ShardUnavailable
from meshfire.model.experts import LocalExperts
from meshfire.placement.shard_map import spread
from services.expert_shard import core
from tests.unit.expert_shard.conftest import (
    LAYOUT,
    MODEL,
    REVISION,
    TinySource,
    by_shard,
    calling,
    plain_sum,
    port_of,
    step_of,
)


@pytest.fixture(autouse=True, params=["grpc", "local"])
def transport(request, cluster):
    """Everything here holds on both ways to a shard."""
    cluster.transport = request.param


def placed_on(num_shards: int, *, epoch: int = 1):
    ids = [f"expert-{index}" for index in range(num_shards)]
    return spread(LAYOUT, ids, epoch=epoch, model=MODEL, revision=REVISION)


@pytest.mark.parametrize("num_shards", [1, 2, 3])
async def test_a_hop_equals_the_formula_and_bit_for_bit_the_experts_in_this_process(cluster, num_shards):
    await cluster.place(placed_on(num_shards))
    for index in range(num_shards):
        await cluster.start(f"expert-{index}")
    step = step_of(num_tokens=7)
    async with calling(cluster) as caller:
        await caller.experts.ready()
        for layer in (1, 2):
            output = await caller.forward(layer, step)
            assert torch.equal(output, LocalExperts(TinySource()).dispatch(layer, *step).result())
            torch.testing.assert_close(output.double(), plain_sum(layer, *step), rtol=1e-5, atol=1e-6)


async def test_each_shard_reads_only_its_own_experts(cluster):
    await cluster.place(placed_on(2))
    sources = [TinySource(), TinySource()]
    for index, source in enumerate(sources):
        await cluster.start(f"expert-{index}", source=source)
    assert sources[0].read == [(layer, expert) for layer in (1, 2) for expert in (0, 1, 2)]
    assert sources[1].read == [(layer, expert) for layer in (1, 2) for expert in (3, 4, 5)]


async def test_rows_and_bytes_are_counted_per_shard(cluster):
    await cluster.place(by_shard({"a": [0, 1, 2], "b": [3, 4, 5]}))
    await cluster.start("a")
    await cluster.start("b")
    hidden = torch.randn(3, 24)
    ids = torch.tensor([[0, 3], [1, 2], [2, 1]], dtype=torch.int32)
    async with calling(cluster) as caller:
        await caller.experts.ready()
        session = caller.session()
        await caller.forward(1, (hidden, ids, torch.ones(3, 2)), session)
        stats = session.stats
        assert (stats["a"].hops, stats["a"].tokens) == (1, 3)
        assert (stats["b"].hops, stats["b"].tokens) == (1, 1)
        assert (stats["b"].bytes_out, stats["b"].bytes_in) == (24 * 4, 24 * 8)
        assert 0 < stats["a"].compute_ns < stats["a"].wait_ns


async def test_a_step_too_long_for_one_message_travels_in_pieces(cluster, monkeypatch):
    monkeypatch.setattr("meshfire.worker.hop_flow.MAX_ANSWER_BYTES", 2 * 24 * 8)
    await cluster.place(placed_on(2))
    await cluster.start("expert-0")
    await cluster.start("expert-1")
    step = step_of(num_tokens=7)
    async with calling(cluster) as caller:
        await caller.experts.ready()
        session = caller.session()
        output = await caller.forward(1, step, session)
        assert torch.equal(output, LocalExperts(TinySource()).dispatch(1, *step).result())
        assert sum(stats.hops for stats in session.stats.values()) >= 4


async def test_a_row_without_experts_is_zero_and_an_empty_step_needs_no_hop(cluster):
    await cluster.place(placed_on(1))
    await cluster.start("expert-0")
    async with calling(cluster) as caller:
        await caller.experts.ready()
        session = caller.session()
        nothing = (torch.randn(2, 24), torch.full((2, 3), -1, dtype=torch.int32), torch.ones(2, 3))
        assert torch.equal(await caller.forward(1, nothing, session), torch.zeros(2, 24))
        assert not session.stats


async def test_two_dispatches_can_be_under_way_and_be_collected_in_any_order(cluster):
    await cluster.place(placed_on(2))
    await cluster.start("expert-0")
    await cluster.start("expert-1")
    first, second = step_of(3, seed=1), step_of(4, seed=2)
    async with calling(cluster) as caller:
        await caller.experts.ready()
        session = caller.session()

        def both():
            one, two = session.dispatch(1, *first), session.dispatch(2, *second)
            return two.result(), one.result()

        two, one = await caller.thread.run(both)
        assert torch.equal(one, LocalExperts(TinySource()).dispatch(1, *first).result())
        assert torch.equal(two, LocalExperts(TinySource()).dispatch(2, *second).result())


async def test_a_hop_outlives_the_restart_of_its_shard_at_the_same_address(cluster):
    await cluster.place(placed_on(1))
    port = port_of(await cluster.start("expert-0"))
    step = step_of(num_tokens=5)
    async with calling(cluster) as caller:
        await caller.experts.ready()
        await cluster.stop("expert-0")
        hop = asyncio.ensure_future(caller.forward(1, step))
        await asyncio.sleep(0.2)
        assert not hop.done()
        await cluster.start("expert-0", port=port)
        assert torch.equal(await hop, LocalExperts(TinySource()).dispatch(1, *step).result())


async def test_a_hop_whose_stream_is_cut_while_the_shard_computes_is_sent_again(cluster, monkeypatch):
    computing, go_on = threading.Event(), threading.Event()
    plain = core.weighted_sum

    def slowly(*args):
        computing.set()
        assert go_on.wait(10)
        return plain(*args)

    monkeypatch.setattr(core, "weighted_sum", slowly)
    await cluster.place(placed_on(1))
    wire = await cluster.wire(await cluster.start("expert-0"))
    step = step_of(num_tokens=5)
    async with calling(cluster) as caller:
        await caller.experts.ready()
        hop = asyncio.ensure_future(caller.forward(1, step))
        await asyncio.to_thread(computing.wait, 10)
        wire.cut()
        go_on.set()
        assert torch.equal(await hop, LocalExperts(TinySource()).dispatch(1, *step).result())


async def test_a_frozen_shard_is_left_for_its_replica_and_used_again_when_it_thaws(cluster):
    await cluster.place(by_shard({"a": range(6), "b": range(6)}))
    wire = await cluster.wire(await cluster.start("a"))
    await cluster.start("b")
    step = step_of(num_tokens=5)
    expected = LocalExperts(TinySource()).dispatch(1, *step).result()
    async with calling(cluster, stall_s=0.2) as caller:
        await caller.experts.ready()
        wire.freeze()
        session = caller.session()
        assert torch.equal(await caller.forward(1, step, session), expected)
        assert session.stats.keys() == {"b"}
        assert caller.experts.shards == {"a": False, "b": True}
        wire.thaw()
        while not caller.experts.shards["a"]:
            await asyncio.sleep(0.02)
        assert torch.equal(await caller.forward(1, step), expected)


async def test_a_frozen_shard_without_replica_is_named_at_the_deadline(cluster):
    await cluster.place(placed_on(1))
    wire = await cluster.wire(await cluster.start("expert-0"))
    async with calling(cluster, stall_s=0.2) as caller:
        await caller.experts.ready()
        wire.freeze()
        with pytest.raises(ShardUnavailable, match="expert-0"):
            await caller.forward(1, step_of(5), caller.session(timeout_s=1.0))


async def test_a_hop_finds_its_shard_at_another_address(cluster):
    await cluster.place(placed_on(1))
    await cluster.start("expert-0")
    step = step_of(num_tokens=5)
    async with calling(cluster) as caller:
        await caller.experts.ready()
        await cluster.stop("expert-0")
        hop = asyncio.ensure_future(caller.forward(1, step))
        await cluster.start("expert-0")
        assert torch.equal(await hop, LocalExperts(TinySource()).dispatch(1, *step).result())


async def test_a_replica_takes_over_without_waiting_for_a_restart(cluster):
    await cluster.place(by_shard({"a": range(6), "b": range(6)}))
    await cluster.start("a")
    await cluster.start("b")
    step = step_of(num_tokens=5)
    async with calling(cluster) as caller:
        await caller.experts.ready()
        await cluster.stop("a")
        session = caller.session()
        assert torch.equal(
            await caller.forward(1, step, session), LocalExperts(TinySource()).dispatch(1, *step).result()
        )
        assert session.stats.keys() == {"b"}


async def test_without_replica_or_restart_the_deadline_names_the_shard(cluster):
    await cluster.place(placed_on(2))
    await cluster.start("expert-0")
    await cluster.start("expert-1")
    async with calling(cluster) as caller:
        await caller.experts.ready()
        await cluster.stop("expert-1")
        session = caller.session(timeout_s=0.5)
        with pytest.raises(ShardUnavailable, match="expert-1"):
            await caller.forward(1, step_of(5), session)


async def test_a_deadline_that_has_passed_is_no_hang(cluster):
    await cluster.place(placed_on(1))
    await cluster.start("expert-0")
    async with calling(cluster) as caller:
        await caller.experts.ready()
        session = caller.experts.session(deadline=time.monotonic() - 1, traceparents=[])
        with pytest.raises(DeadlineExceeded):
            await caller.forward(1, step_of(5), session)


async def test_closing_the_mesh_ends_what_waits(cluster):
    await cluster.place(placed_on(1))
    await cluster.start("expert-0")
    async with calling(cluster) as caller:
        await caller.experts.ready()
        await cluster.stop("expert-0")
        session = caller.session()
        pending = await caller.thread.run(session.dispatch, 1, *step_of(5))
    with pytest.raises(ShardUnavailable):
        pending.result()
    with pytest.raises(ShardUnavailable):
        session.dispatch(1, *step_of(5))


async def test_a_hop_of_nan_is_an_error_and_the_next_one_works(cluster):
    await cluster.place(placed_on(1))
    await cluster.start("expert-0")
    hidden, ids, weights = step_of(3)
    async with calling(cluster) as caller:
        await caller.experts.ready()
        with pytest.raises(NonFiniteValue):
            await caller.forward(1, (hidden * torch.nan, ids, weights))
        with pytest.raises(BadInput):
            await caller.forward(1, (hidden[:, :-1], ids, weights))
        assert (await caller.forward(1, (hidden, ids, weights))).isfinite().all()


async def test_experts_move_to_another_shard_under_traffic_without_a_failed_hop(cluster):
    halves = {"a": [0, 1, 2], "b": [3, 4, 5]}
    await cluster.place(by_shard(halves))
    await cluster.start("a")
    await cluster.start("b")
    step = step_of(num_tokens=4)
    expected = LocalExperts(TinySource()).dispatch(1, *step).result()
    async with calling(cluster) as caller:
        await caller.experts.ready()
        for epoch in range(2, 8):
            halves = {"a": halves["b"], "b": halves["a"]}
            await cluster.place(by_shard(halves, epoch=epoch))
            while caller.experts.placement_epoch < epoch:
                assert torch.equal(await caller.forward(1, step), expected)
        assert torch.equal(await caller.forward(1, step), expected)


async def test_a_caller_that_missed_epochs_catches_up_with_the_shard(cluster):
    await cluster.place(by_shard({"a": range(6)}))
    await cluster.start("a")
    step = step_of(num_tokens=4)
    async with calling(cluster) as caller:
        await caller.experts.ready()
        for epoch in (2, 3, 4):
            await cluster.place(by_shard({"a": range(6)}, epoch=epoch))
            await asyncio.sleep(0.02)
        assert torch.equal(await caller.forward(1, step), LocalExperts(TinySource()).dispatch(1, *step).result())


async def test_ready_waits_for_placement_and_shards_in_any_order(cluster):
    async with calling(cluster) as caller:
        ready = asyncio.ensure_future(caller.experts.ready())
        await asyncio.sleep(0.05)
        await cluster.place(placed_on(2))
        await cluster.start("expert-0")
        await asyncio.sleep(0.05)
        assert not ready.done()
        await cluster.start("expert-1")
        await ready
        assert caller.experts.shards == {"expert-0": True, "expert-1": True}


async def test_a_shard_of_another_revision_is_refused(cluster):
    await cluster.place(placed_on(1))
    await cluster.start("expert-0", revision="r2", experts="*:0-5")
    async with calling(cluster, mismatch_patience_s=0.2) as caller:
        with pytest.raises(ModelMismatch, match="r2"):
            await caller.experts.ready()


async def test_a_placement_of_another_revision_or_layout_is_refused(cluster):
    await cluster.place(placed_on(1))
    async with calling(cluster, model_revision="r9", mismatch_patience_s=0.1) as caller:
        with pytest.raises(ModelMismatch, match="r9"):
            await caller.experts.ready()


async def test_an_error_in_the_callers_block_comes_out_as_itself(cluster):
    with pytest.raises(KeyError):
        async with calling(cluster):
            raise KeyError("mine")
