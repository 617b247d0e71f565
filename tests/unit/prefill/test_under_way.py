"""Equal prompts at once: shared blocks are computed once, whoever fails, and every wait ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfire.errors import Cancelled, DeadlineExceeded
from meshfire.kv.block_pool import BlockPool
from meshfire.kv.hashing import chain_hashes
from services.prefill.blocks import SequenceBlocks
from services.prefill.prompt import Stop
from services.prefill.under_way import UnderWay
from tests.unit.prefill.conftest import Worker
from tests.unit.prefill.fakes import expected_hidden, lease_of, until

PROMPT = list(range(1, 15))  # 14 tokens: 3 full blocks and a partial one


async def start_held(worker: Worker, *token_ids: Sequence[int], **changes: object) -> None:
    """Lease r1, r2, …; the first is on the model thread and stays there until `may_run` is set."""
    worker.model.may_run.clear()
    worker.model.entered.clear()
    for index, tokens in enumerate(token_ids):
        worker.engine.on_lease("router-1", lease_of(tokens, **{"request_id": f"r{index + 1}", **changes}))
        if index == 0:
            await asyncio.to_thread(worker.model.entered.wait, 10)
    await asyncio.sleep(0.01)


async def test_equal_prompts_compute_their_shared_blocks_once(worker: Worker) -> None:
    await start_held(worker, PROMPT, PROMPT)
    assert len(worker.model.steps) == 1, "the second waits instead of computing"
    worker.model.may_run.set()
    offers = {one.request_id: one for one in [(await worker.link.message(index)).kv_offer for index in range(2)]}
    assert offers["r1"].num_cached_tokens == 0
    assert offers["r2"].num_cached_tokens == 12
    assert sum(map(len, worker.model.steps)) == 14 + 2
    first, second = (worker.shelf._offered[offers[name].kv_lease_id].prefilled for name in ("r1", "r2"))
    assert first.blocks[:3] == second.blocks[:3]
    assert first.last_hidden.tolist() == second.last_hidden.tolist() == expected_hidden(PROMPT)


async def test_a_prompt_that_goes_on_differently_waits_only_for_what_is_the_same(worker: Worker) -> None:
    other = [*PROMPT[:5], 90, 91, 92, 93]  # differs in the middle of the second block
    await start_held(worker, PROMPT, other)
    worker.model.may_run.set()
    offers = {one.request_id: one for one in [(await worker.link.message(index)).kv_offer for index in range(2)]}
    assert offers["r2"].num_cached_tokens == 4
    assert worker.shelf._offered[offers["r2"].kv_lease_id].prefilled.last_hidden.tolist() == expected_hidden(other)


async def test_another_salt_waits_for_nobody(worker: Worker) -> None:
    await start_held(worker, PROMPT)
    salted = lease_of(PROMPT, request_id="r2")
    salted.prefill.cache_salt = "tenant"
    worker.engine.on_lease("router-1", salted)
    worker.model.may_run.set()
    offers = [(await worker.link.message(index)).kv_offer for index in range(2)]
    assert [one.num_cached_tokens for one in offers] == [0, 0]
    assert sum(map(len, worker.model.steps)) == 28


async def test_when_the_computing_prompt_is_cancelled_the_waiter_computes_what_is_missing(worker: Worker) -> None:
    await start_held(worker, PROMPT, PROMPT)
    worker.engine.on_cancel("router-1", "r1", 1)
    worker.model.may_run.set()
    offer = (await worker.link.message(0)).kv_offer
    assert offer.request_id == "r2"
    prefilled = worker.shelf._offered[offer.kv_lease_id].prefilled
    assert prefilled.last_hidden.tolist() == expected_hidden(PROMPT)


async def test_when_the_computing_prompt_fails_the_waiter_computes(worker: Worker) -> None:
    worker.model.error = ZeroDivisionError("broken")
    await start_held(worker, PROMPT, PROMPT)
    worker.model.may_run.set()
    failed = (await worker.link.message(0)).failed
    worker.model.error = None
    assert failed.request_id == "r1"
    message = await worker.link.message(1)
    if message.HasField("failed"):  # it ran before the error was taken away: then it failed by itself
        assert message.failed.request_id == "r2"
        assert len(worker.model.steps) == 2
    else:
        assert message.kv_offer.num_cached_tokens == 0


async def test_a_waiter_ends_with_its_own_cancel_or_deadline(worker: Worker) -> None:
    await start_held(worker, PROMPT, PROMPT)
    worker.engine.on_cancel("router-1", "r2", 1)
    await until(lambda: len(worker.engine._running) == 1)
    worker.engine.on_lease("router-1", lease_of(PROMPT, request_id="r3", remaining_ms=30))
    failed = (await worker.link.message(0)).failed
    assert (failed.request_id, failed.reason) == ("r3", "DEADLINE_EXCEEDED")
    assert len(worker.model.steps) == 1


async def test_a_rehearsed_delay_is_not_waited_for(worker: Worker) -> None:
    worker.engine.on_lease("router-1", lease_of(PROMPT, fault="prefill:delay=30s"))
    await asyncio.sleep(0.01)
    worker.engine.on_lease("router-1", lease_of(PROMPT, request_id="r2"))
    assert (await worker.link.message(0)).kv_offer.request_id == "r2"
    worker.engine.on_cancel("router-1", "r1", 1)


async def test_a_scored_prompt_waits_for_nobody(worker: Worker) -> None:
    await start_held(worker, PROMPT)
    scored = lease_of(PROMPT, request_id="r2")
    scored.prefill.num_prompt_logprobs = 0
    worker.model.logits = lambda hidden: hidden.new_zeros(len(hidden), 100)  # type: ignore[method-assign]
    worker.engine.on_lease("router-1", scored)
    worker.model.may_run.set()
    await until(lambda: sum(one.HasField("kv_offer") for _, one in worker.link.sent) == 2)
    assert sum(map(len, worker.model.steps)) == 28


async def test_what_another_computes_is_not_announced_twice() -> None:
    under_way = UnderWay()
    with under_way.announce([b"a", b"b"]), under_way.announce([b"b", b"c"]) as second:
        assert len(under_way) == 3
        waiting = asyncio.ensure_future(under_way.wait([b"b"], lambda: 0, Stop(float("inf"))))
        second.step()
        await asyncio.sleep(0.01)
        assert not waiting.done(), "the first one computes it"
    await waiting
    assert len(under_way) == 0


@pytest.mark.parametrize("error", [Cancelled("gone"), DeadlineExceeded("late")])
async def test_a_stopped_waiter_leaves_the_flight_to_others(error: Cancelled | DeadlineExceeded) -> None:
    under_way = UnderWay()
    stop, other = Stop(float("inf")), Stop(float("inf"))
    with under_way.announce([b"a"]):
        first = asyncio.ensure_future(under_way.wait([b"a"], lambda: 0, stop))
        second = asyncio.ensure_future(under_way.wait([b"a"], lambda: 0, other))
        await asyncio.sleep(0)
        stop.set(error)
        with pytest.raises(type(error)):
            await first
        assert not second.done()
    await second


PLANS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=14),  # tokens: few, so that beginnings are equal
        st.integers(0, 4),  # chunks until it breaks off
        st.integers(0, 3),  # turns of the loop before it starts
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(PLANS)
def test_every_prompt_ends_and_no_block_is_computed_by_two_at_once(plans: list[tuple[list[int], int, int]]) -> None:
    asyncio.run(_run_all(plans))


async def _run_all(plans: list[tuple[list[int], int, int]]) -> None:
    pool, under_way, computing = BlockPool(64), UnderWay(), set()

    async def prompt(token_ids: list[int], num_chunks: int, delay: int) -> None:
        for _ in range(delay):
            await asyncio.sleep(0)
        hashes = chain_hashes(token_ids, 4, model_revision="r")
        blocks = SequenceBlocks(pool, hashes, len(token_ids), 4)
        await blocks.wait_for(under_way, Stop(float("inf")))
        with blocks, under_way.announce(blocks.to_compute) as flight:
            reusable = set(list(blocks.to_compute)[: (len(token_ids) - 1) // 4 - blocks.num_cached_tokens // 4])
            assert not reusable & computing
            computing.update(reusable)
            try:
                for chunk in range(num_chunks):
                    await asyncio.sleep(0)
                    blocks.publish_up_to(min(len(token_ids), blocks.num_cached_tokens + 4 * (chunk + 1)))
                    flight.step()
            finally:
                computing.difference_update(reusable)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for plan in plans:
            group.create_task(prompt(*plan))
    pool.check()
    assert pool.num_free == 64
    assert len(under_way) == 0
