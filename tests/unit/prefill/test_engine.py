"""A prefill worker's leases, from the router's message to its answer; every test ends with all blocks free."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.errors import BadInput, Draining, InvalidPrompt, PromptTooLong, QueueFull, ShardUnavailable, TestHooksOff
from meshfire.kv.hashing import chain_hashes
from meshfire.telemetry import names
from tests.unit.prefill.conftest import NUM_BLOCKS, Worker
from tests.unit.prefill.fakes import GEOMETRY, expected_hidden, expected_row, lease_of, until

PROMPT = list(range(1, 15))  # 14 tokens: 3 full blocks and a partial one


def offered(worker: Worker, lease_id: str):  # type: ignore[no-untyped-def]
    return worker.shelf._offered[lease_id]


async def offer_of(worker: Worker, token_ids: list[int], index: int = 0, **changes: object) -> pb.KvOffer:
    worker.engine.on_lease("router-1", lease_of(token_ids, **changes))
    message = await worker.link.message(index)
    assert message.WhichOneof("message") == "kv_offer", message
    return message.kv_offer


async def test_a_prompt_is_computed_in_chunks_and_its_kv_offered(worker: Worker) -> None:
    offer = await offer_of(worker, PROMPT)
    assert worker.model.steps == [PROMPT[:6], PROMPT[6:12], PROMPT[12:]]
    assert (offer.request_id, offer.epoch, offer.num_tokens, offer.num_cached_tokens) == ("r1", 1, 14, 0)
    assert offer.num_bytes == 4 * GEOMETRY.block_bytes
    assert 0 < offer.expires_ms <= 30_000
    prefilled = offered(worker, offer.kv_lease_id).prefilled
    assert prefilled.last_hidden.tolist() == expected_hidden(PROMPT)
    assert list(prefilled.manifest.block_hashes) == chain_hashes(PROMPT, 4, model_revision="rev")
    for layer in range(GEOMETRY.num_layers):
        rows = worker.store.read(layer, torch.tensor(prefilled.blocks), 14)
        assert rows.tolist() == [expected_row(layer, token, position) for position, token in enumerate(PROMPT)]


@pytest.mark.parametrize(
    ("second", "num_cached"),
    [
        (PROMPT, 12),
        (PROMPT[:12], 8),  # the last token is always computed, so its block is not reused
        (PROMPT[:13], 12),
        (PROMPT[:3], 0),
        ([*PROMPT, 50, 51, 52], 12),
        ([*PROMPT[:9], 99, *PROMPT[10:]], 8),
        ([99, *PROMPT[1:]], 0),
    ],
)
async def test_a_cached_prefix_is_reused_and_the_result_is_the_same(
    worker: Worker, second: list[int], num_cached: int
) -> None:
    await offer_of(worker, PROMPT)
    worker.model.steps.clear()
    offer = await offer_of(worker, second, 1, request_id="r2")
    assert offer.num_cached_tokens == num_cached
    assert sum(map(len, worker.model.steps)) == len(second) - num_cached
    prefilled = offered(worker, offer.kv_lease_id).prefilled
    assert prefilled.last_hidden.tolist() == expected_hidden(second)


async def test_the_prefix_cache_outlives_its_lease_but_not_another_salt(worker: Worker) -> None:
    await offer_of(worker, PROMPT)
    worker.engine.on_cancel("router-1", "r1", 1)
    assert worker.all_blocks_are_free()
    salted = lease_of(PROMPT, request_id="r2")
    salted.prefill.cache_salt = "tenant"
    worker.engine.on_lease("router-1", salted)
    assert (await worker.link.message(1)).kv_offer.num_cached_tokens == 0
    assert (await offer_of(worker, PROMPT, 2, request_id="r3")).num_cached_tokens == 12


async def test_a_cancel_in_the_middle_of_a_chunk_frees_all_blocks_when_the_chunk_is_done(worker: Worker) -> None:
    worker.model.may_run.clear()
    worker.engine.on_lease("router-1", lease_of(PROMPT))
    await asyncio.to_thread(worker.model.entered.wait, 10)
    worker.engine.on_cancel("router-1", "r1", 1)
    await asyncio.sleep(0)
    assert worker.pool.num_free == NUM_BLOCKS - 4  # the chunk still writes there
    worker.model.may_run.set()
    await until(worker.engine.idle.is_set)
    assert worker.all_blocks_are_free()
    assert worker.link.sent == []
    assert len(worker.model.steps) == 1
    assert len(worker.experts.finished) == 1


async def test_a_prompt_that_waits_for_the_model_thread_is_not_computed_once_cancelled(worker: Worker) -> None:
    worker.model.may_run.clear()
    worker.engine.on_lease("router-1", lease_of([1]))
    worker.engine.on_lease("router-1", lease_of([2], request_id="r2"))
    await asyncio.to_thread(worker.model.entered.wait, 10)
    worker.engine.on_cancel("router-1", "r2", 1)
    worker.model.may_run.set()
    await until(worker.engine.idle.is_set)
    assert worker.model.steps == [[1]]


async def test_a_cancel_ends_older_epochs_but_neither_newer_ones_nor_other_requests(worker: Worker) -> None:
    first = await offer_of(worker, PROMPT)
    second = await offer_of(worker, PROMPT, 1, epoch=2)
    other = await offer_of(worker, PROMPT, 2, request_id="r2")
    worker.engine.on_cancel("router-1", "r1", 1)
    worker.engine.on_cancel("router-2", "r2", 9)
    worker.engine.on_cancel("router-1", "unknown", 9)
    assert set(worker.shelf._offered) == {second.kv_lease_id, other.kv_lease_id}
    assert first.kv_lease_id not in worker.shelf._offered


async def test_a_lost_router_takes_its_prompts_and_its_offers_with_it(worker: Worker) -> None:
    await offer_of(worker, PROMPT)
    worker.model.may_run.clear()
    worker.engine.on_lease("router-1", lease_of([1, 2], request_id="r2"))
    worker.engine.on_router_lost("router-1")
    worker.model.may_run.set()
    await until(worker.engine.idle.is_set)
    assert len(worker.shelf) == 0
    assert worker.all_blocks_are_free()


@pytest.mark.parametrize(
    ("lease", "error", "field"),
    [
        (lease_of([]), InvalidPrompt, "token_ids"),
        (lease_of([5, -1]), InvalidPrompt, "token_ids"),
        (lease_of([5, 100]), InvalidPrompt, "token_ids"),
        (lease_of([1] * 49), PromptTooLong, "token_ids"),  # 12 blocks of 4 hold 48
        (lease_of([1] * 65), PromptTooLong, "token_ids"),
        (lease_of([1], fault="prefill:explode"), BadInput, "fault"),
        (pb.Lease(request_id="r1", epoch=1, remaining_ms=1000, decode=pb.DecodeWork()), BadInput, "work"),
    ],
)
async def test_a_bad_lease_is_refused_with_the_field_named(
    worker: Worker, lease: pb.Lease, error: type[BadInput], field: str
) -> None:
    with pytest.raises(error) as caught:
        worker.engine.on_lease("router-1", lease)
    assert caught.value.field == field
    assert worker.engine.idle.is_set()
    assert worker.link.credits[-1] == (2, NUM_BLOCKS)


async def test_a_prompt_that_is_too_long_says_how_long_it_may_be(worker: Worker) -> None:
    with pytest.raises(PromptTooLong) as caught:
        worker.engine.on_lease("router-1", lease_of([1] * 50))
    assert caught.value.metadata == {"num_tokens": "50", "max_tokens": "48"}


async def test_faults_are_refused_where_test_hooks_are_off(worker: Worker) -> None:
    worker.engine._admission = replace(worker.engine._admission, hooks_on=False)
    with pytest.raises(TestHooksOff):
        worker.engine.on_lease("router-1", lease_of([1], fault="prefill:delay=1s"))


async def test_no_room_for_the_kv_is_a_retryable_failure_that_takes_nothing(worker: Worker) -> None:
    await offer_of(worker, list(range(40)))  # 10 of 12 blocks
    worker.engine.on_lease("router-1", lease_of([99] * 16, request_id="r2"))
    failed = (await worker.link.message(1)).failed
    assert (failed.request_id, failed.reason, failed.retryable) == ("r2", "NO_FREE_BLOCKS", True)
    assert dict(failed.metadata) == {"wanted_blocks": "4", "free_blocks": "2"}
    assert worker.pool.num_free == 2


async def test_errors_of_the_experts_reach_the_router_as_they_are(worker: Worker) -> None:
    worker.model.error = ShardUnavailable("shard-1 is away", metadata={"shard_id": "shard-1"})
    worker.engine.on_lease("router-1", lease_of(PROMPT))
    failed = (await worker.link.message()).failed
    assert (failed.reason, failed.retryable, failed.metadata["shard_id"]) == ("SHARD_UNAVAILABLE", True, "shard-1")
    await until(worker.engine.idle.is_set)
    assert worker.all_blocks_are_free()


async def test_a_defect_is_an_internal_error_without_detail_and_the_worker_goes_on(worker: Worker) -> None:
    worker.model.error = ZeroDivisionError("secret")
    worker.engine.on_lease("router-1", lease_of(PROMPT))
    failed = (await worker.link.message()).failed
    assert failed.reason == "INTERNAL_ERROR"
    assert "secret" not in failed.message
    worker.model.error = None
    await offer_of(worker, PROMPT, 1, request_id="r2")


async def test_a_deadline_that_passes_between_chunks_ends_the_prompt(worker: Worker) -> None:
    worker.engine.on_lease("router-1", lease_of(PROMPT, remaining_ms=30, fault="prefill:delay=9s@chunk=1"))
    failed = (await worker.link.message()).failed
    assert (failed.reason, failed.retryable) == ("DEADLINE_EXCEEDED", False)
    assert len(worker.model.steps) == 1


async def test_a_rehearsed_delay_holds_up_only_its_own_request_and_ends_with_a_cancel(worker: Worker) -> None:
    worker.engine.on_lease("router-1", lease_of(PROMPT, fault="prefill-0:delay=30s"))
    await offer_of(worker, [7, 8], request_id="r2")
    worker.engine.on_cancel("router-1", "r1", 1)
    await until(worker.engine.idle.is_set)
    assert worker.model.steps == [[7, 8]]


async def test_a_fault_for_another_worker_or_of_a_later_epoch_does_nothing(worker: Worker) -> None:
    await offer_of(worker, PROMPT, fault="prefill-3:kill")
    await offer_of(worker, PROMPT, 1, request_id="r2", fault="decode:kill@token=1")
    await offer_of(worker, PROMPT, 2, request_id="r3", epoch=2, fault="prefill:kill")


async def test_a_kill_fault_kills_before_the_named_chunk(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr("meshfire.worker.faults.os.kill", lambda _pid, number: killed.append(number))
    await offer_of(worker, PROMPT[:6], fault="prefill:kill@chunk=1")
    assert killed == []
    await offer_of(worker, [9, *PROMPT], 1, request_id="r2", fault="prefill:kill@chunk=1")
    assert killed == [9]


async def test_credit_follows_slots_and_blocks(worker: Worker) -> None:
    assert worker.link.credits[0] == (2, NUM_BLOCKS)
    worker.model.may_run.clear()
    worker.engine.on_lease("router-1", lease_of(PROMPT))
    worker.engine.on_lease("router-1", lease_of([1], request_id="r2"))
    assert worker.link.credits[-1][0] == 0
    with pytest.raises(QueueFull):
        worker.engine.on_lease("router-1", lease_of([1], request_id="r3"))
    worker.model.may_run.set()
    await worker.link.message(1)
    await until(worker.engine.idle.is_set)
    assert worker.link.credits[-1] == (2, NUM_BLOCKS - 5)
    worker.engine.on_cancel("router-1", "r1", 1)
    assert worker.link.credits[-1] == (2, NUM_BLOCKS - 1)


async def test_draining_takes_nothing_new_finishes_prompts_and_waits_for_offers(worker: Worker) -> None:
    worker.model.may_run.clear()
    worker.engine.on_lease("router-1", lease_of(PROMPT))
    async with asyncio.TaskGroup() as tasks:
        drain = tasks.create_task(worker.engine.drain())
        await until(lambda: worker.link.credits[-1][0] == 0)
        with pytest.raises(Draining):
            worker.engine.on_lease("router-1", lease_of([1], request_id="r2"))
        worker.model.may_run.set()
        offer = (await worker.link.message()).kv_offer
        await until(worker.engine.idle.is_set)
        assert not drain.done()
        worker.shelf.grant(offer.kv_lease_id, 1, "decode-1")
        worker.shelf.release(offer.kv_lease_id, 1, "decode-1", acknowledged=False)
        await asyncio.wait_for(drain, 10)
    assert worker.all_blocks_are_free()


async def test_a_lease_is_one_span_with_its_chunks_and_what_each_shard_did(worker: Worker) -> None:
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    await offer_of(worker, PROMPT, traceparent=parent)
    worker.telemetry.flush()
    found = {span.name: span for span in worker.spans.get_finished_spans()}
    lease, chunk = found[names.SPAN_PREFILL_LEASE], found[names.SPAN_PREFILL_CHUNK]
    assert f"{lease.context.trace_id:032x}" == "a" * 32
    assert f"{lease.parent.span_id:016x}" == "b" * 16
    assert chunk.parent.span_id == lease.context.span_id
    assert lease.attributes[names.ATTR_TOKENS_PROMPT] == 14
    assert lease.attributes[names.ATTR_TOKENS_CACHED] == 0
    assert lease.attributes[names.ATTR_KV_BYTES] == 4 * GEOMETRY.block_bytes
    (event,) = lease.events
    assert event.attributes[names.ATTR_SHARD_ID] == "shard-0"
    assert event.attributes[names.ATTR_EXPERT_HOPS] == 3
    assert worker.experts.opened == worker.experts.finished
    assert f"{lease.context.span_id:016x}" in worker.experts.opened[0][0]
