"""The engine with fakes around it: tokens equal the oracle's whatever happens, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from meshfire.api.common.v1 import sampling_pb2
from meshfire.errors import Draining, MeshfireError, ModelMismatch, NonFiniteValue, ShardUnavailable, StaleEpoch
from meshfire.worker import faults
from tests.unit.decode.conftest import ROUTER, StartWorker, Worker
from tests.unit.decode.fakes import CONTEXT_TOKENS, END_ID, P, continuation

STOP = sampling_pb2.FINISH_REASON_STOP
LENGTH = sampling_pb2.FINISH_REASON_LENGTH


async def test_one_sequence_gets_the_oracle_s_tokens_and_leaves_nothing(worker: Worker) -> None:
    worker.lease("a", [1, 2, 3, 4, 5], max_tokens=10)
    end = await worker.link.finished("a")
    assert worker.link.tokens("a") == continuation([1, 2, 3, 4, 5], 10)
    assert end.finish_reason == LENGTH
    assert not end.HasField("stop_token_id")
    assert end.kv_bytes == 2 * 2 * 2 * 4 * P
    await worker.until_released(("kv-a-1", True))
    await worker.until_idle()
    assert worker.link.credit == (6, 40)


async def test_sequences_that_join_and_leave_at_different_times_do_not_change_each_other(worker: Worker) -> None:
    rng = random.Random(3)
    prompts = {f"r{n}": [rng.randrange(30) for _ in range(rng.randrange(1, 12))] for n in range(12)}
    lengths = {name: rng.randrange(1, 20) for name in prompts}
    for name, prompt in prompts.items():
        await worker.link.until(lambda: worker.link.credit[0] > 0)
        worker.lease(name, prompt, max_tokens=lengths[name])
        await asyncio.sleep(rng.random() * 0.01)
    for name, prompt in prompts.items():
        await worker.link.finished(name)
        assert worker.link.tokens(name) == continuation(prompt, lengths[name])
    assert max(len(step) for step in worker.model.steps) > 1
    await worker.until_idle()


async def test_a_step_is_one_message_to_each_router(worker: Worker) -> None:
    worker.model.may_run.clear()
    worker.lease("first", [7], max_tokens=30, router_id="other")
    await worker.until_entered()
    for name in ("a", "b"):
        worker.lease(name, [1, 2], max_tokens=3)
    await asyncio.sleep(0.02)
    worker.model.may_run.set()
    await worker.link.finished("a")
    await worker.link.finished("b")
    mine = [message for router, message in worker.link.sent if router == ROUTER and message.HasField("progress")]
    assert [[one.request_id for one in message.progress.tokens] for message in mine] == [["a", "b"]] * 3
    theirs = [message for router, message in worker.link.sent if router == "other"]
    assert all(one.request_id == "first" for message in theirs for one in message.progress.tokens)


@pytest.mark.parametrize(("shared", "num_held"), [(0, 0), (6, 1), (8, 2), (12, 3)])
async def test_a_prefix_that_is_held_is_not_read_and_changes_no_token(
    worker: Worker, shared: int, num_held: int
) -> None:
    worker.lease("before", list(range(1, 13)), max_tokens=2)
    await worker.link.finished("before")
    prompt = [*range(1, shared + 1), *([30] * (12 - shared))]
    worker.lease("after", prompt, max_tokens=9)
    await worker.link.finished("after")
    assert worker.reader.num_held["kv-after-1"] == num_held
    assert worker.link.tokens("after") == continuation(prompt, 9)


async def test_other_salts_share_no_prefix(worker: Worker) -> None:
    worker.lease("mine", [1, 2, 3, 4], max_tokens=1, cache_salt="me")
    await worker.link.finished("mine")
    worker.lease("yours", [1, 2, 3, 4], max_tokens=1, cache_salt="you")
    await worker.link.finished("yours")
    assert worker.reader.num_held["kv-yours-1"] == 0


# --- how outputs end --------------------------------------------------------------------------------------------------


async def test_a_stop_token_ends_the_output_and_is_reported_but_not_part_of_it(worker: Worker) -> None:
    expected = continuation([1, 2, 3], 6)
    worker.lease("a", [1, 2, 3], max_tokens=20, sampling={"stop_token_ids": [expected[5]]})
    end = await worker.link.finished("a")
    assert (end.finish_reason, end.stop_token_id) == (STOP, expected[5])
    assert worker.link.tokens("a") == expected[: expected.index(expected[5])]


async def test_the_model_s_end_token_ends_the_output_unless_it_is_ignored(worker: Worker) -> None:
    worker.lease("goes-on", [1], max_tokens=3, sampling={"ignore_eos": True})
    worker.lease("forced", [1], max_tokens=3, scripted=True, script_token_ids=[5, END_ID, 6])
    worker.lease(
        "forced-on", [1], max_tokens=2, scripted=True, script_token_ids=[5, END_ID], sampling={"ignore_eos": True}
    )
    assert (await worker.link.finished("goes-on")).finish_reason == LENGTH
    end = await worker.link.finished("forced")
    assert (end.finish_reason, end.stop_token_id) == (STOP, END_ID)
    assert worker.link.tokens("forced") == [5]
    assert (await worker.link.finished("forced-on")).finish_reason == LENGTH
    assert worker.link.tokens("forced-on") == [5, END_ID]


async def test_no_end_token_is_chosen_before_min_tokens(worker: Worker) -> None:
    first = continuation([1, 2, 3], 1)[0]
    worker.lease("a", [1, 2, 3], max_tokens=20, sampling={"stop_token_ids": [first], "min_tokens": 3})
    await worker.link.finished("a")
    tokens = worker.link.tokens("a")
    assert len(tokens) >= 3
    assert first not in tokens


async def test_the_context_window_ends_an_output(worker: Worker) -> None:
    worker.lease("a", [3] * (CONTEXT_TOKENS - 4), max_tokens=50)
    assert (await worker.link.finished("a")).finish_reason == LENGTH
    assert worker.link.tokens("a") == continuation([3] * (CONTEXT_TOKENS - 4), 4)


async def test_a_worker_s_kv_is_a_context_window_too(start_worker: StartWorker) -> None:
    async with start_worker(num_blocks=3) as worker:
        worker.lease("a", [3] * 9, max_tokens=50)
        assert (await worker.link.finished("a")).finish_reason == LENGTH
        assert worker.link.tokens("a") == continuation([3] * 9, 3)


async def test_log_probabilities_come_with_each_token_if_asked_for(worker: Worker) -> None:
    worker.lease("a", [1, 2], max_tokens=4, sampling={"num_logprobs": 2})
    await worker.link.finished("a")
    for one in worker.link.progress("a"):
        (logprobs,) = one.logprobs
        assert logprobs.top_ids[0] == one.token_ids[0]
        assert logprobs.logprob == logprobs.top_logprobs[0]
        assert len(logprobs.top_ids) == len(logprobs.top_logprobs) == 2


# --- a later epoch goes on where an earlier one stopped ---------------------------------------------------------------


async def test_a_lease_with_tokens_so_far_continues_their_count_and_their_text(worker: Worker) -> None:
    whole = continuation([1, 2, 3], 10)
    worker.lease("a", [1, 2, 3, *whole[:4]], epoch=2, num_prompt_tokens=3, max_tokens=10)
    await worker.link.finished("a", epoch=2)
    assert worker.link.progress("a", epoch=2)[0].first_index == 4
    assert worker.link.tokens("a", epoch=2) == whole[4:]


async def test_a_seeded_sample_goes_on_unchanged_at_the_next_epoch(worker: Worker) -> None:
    seeded = {"temperature": 5.0, "seed": 99}
    worker.lease("whole", [1, 2, 3], max_tokens=12, sampling=seeded)
    await worker.link.finished("whole")
    whole = worker.link.tokens("whole")
    worker.lease("part", [1, 2, 3, *whole[:5]], epoch=2, num_prompt_tokens=3, max_tokens=12, sampling=seeded)
    await worker.link.finished("part", epoch=2)
    assert worker.link.tokens("part", epoch=2) == whole[5:]
    assert len(set(whole)) > 3


async def test_a_lease_with_nothing_left_to_choose_finishes_at_once(worker: Worker) -> None:
    worker.lease("a", [1, 2, 3, 4], epoch=2, num_prompt_tokens=1, max_tokens=3)
    assert (await worker.link.finished("a", epoch=2)).finish_reason == LENGTH
    assert worker.link.tokens("a", epoch=2) == []
    await worker.until_released(("kv-a-2", False))


async def test_a_newer_epoch_replaces_the_older_one(worker: Worker) -> None:
    worker.reader.gates["kv-a-1"] = asyncio.Event()
    worker.lease("a", [1, 2, 3])
    worker.lease("a", [1, 2, 3], epoch=2)
    await worker.link.finished("a", epoch=2)
    assert worker.link.ends("a", epoch=1) == []
    with pytest.raises(StaleEpoch):
        worker.reader.gates["kv-b-3"] = asyncio.Event()
        worker.lease("b", [1], epoch=3)
        worker.lease("b", [1], epoch=2)


# --- leaving early ----------------------------------------------------------------------------------------------------


async def test_a_cancel_frees_everything_wherever_the_lease_is(start_worker: StartWorker) -> None:
    async with start_worker(max_batch=2) as worker:
        worker.reader.gates["kv-reading-1"] = asyncio.Event()
        worker.model.may_run.clear()
        worker.lease("running", [1] * 5, max_tokens=30)
        await worker.until_entered()
        worker.lease("reading", [2] * 5)
        worker.lease("waiting", [3] * 5)
        await asyncio.sleep(0.01)
        for name in ("running", "reading", "waiting"):
            worker.engine.on_cancel(ROUTER, name, 1)
        assert worker.link.credit[0] < 4, "the step still uses the running sequence's slot and blocks"
        assert worker.pool.num_free < worker.pool.num_blocks
        worker.model.may_run.set()
        await worker.until_idle()
        assert all(worker.link.ends(name) == [] for name in ("running", "reading", "waiting"))
        await worker.until_released(
            ("kv-reading-1", False),
            ("kv-running-1", True),
            ("kv-waiting-1", False),
        )
        assert len(worker.experts.finished) == 3


async def test_a_cancel_of_an_older_epoch_changes_nothing(worker: Worker) -> None:
    worker.lease("a", [1, 2], epoch=2, max_tokens=5)
    worker.engine.on_cancel(ROUTER, "a", 1)
    worker.engine.on_cancel("other-router", "a", 2)
    worker.engine.on_cancel(ROUTER, "unknown", 9)
    await worker.link.finished("a", epoch=2)


async def test_a_lost_router_takes_only_its_own_leases_along(worker: Worker) -> None:
    worker.reader.gates["kv-lost-1"] = asyncio.Event()
    worker.lease("lost", [1, 2], router_id="lost-router")
    worker.lease("kept", [1, 2], max_tokens=4)
    worker.engine.on_router_lost("lost-router")
    await worker.link.finished("kept")
    assert worker.link.tokens("kept") == continuation([1, 2], 4)
    assert worker.link.ends("lost") == []
    await worker.until_idle()


async def test_the_deadline_ends_a_lease_whose_kv_never_comes(worker: Worker) -> None:
    worker.reader.gates["kv-a-1"] = asyncio.Event()
    worker.lease("a", [1, 2], remaining_ms=50)
    failed = await worker.link.failed("a")
    assert (failed.reason, failed.retryable) == ("DEADLINE_EXCEEDED", False)
    await worker.until_idle()
    await worker.until_released(("kv-a-1", False))


async def test_draining_takes_no_lease_and_ends_with_the_last_one(worker: Worker) -> None:
    worker.reader.gates["kv-a-1"] = asyncio.Event()
    worker.lease("a", [1, 2], max_tokens=3)
    drained = asyncio.ensure_future(worker.engine.drain())
    await asyncio.sleep(0.01)
    assert worker.link.credit[0] == 0
    with pytest.raises(Draining):
        worker.lease("b", [1])
    assert not drained.done()
    worker.reader.gates["kv-a-1"].set()
    await drained
    assert worker.link.tokens("a") == continuation([1, 2], 3)


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_a_failed_read_is_retryable_whatever_it_failed_of_and_harms_nobody_else(worker: Worker) -> None:
    worker.reader.errors["kv-bad-1"] = ModelMismatch("model_revision differs", field="model_revision")
    worker.reader.errors["kv-worse-1"] = ValueError("a defect")
    worker.lease("good", [1, 2], max_tokens=6)
    worker.lease("bad", [1, 2])
    worker.lease("worse", [1, 2])
    bad, worse = await worker.link.failed("bad"), await worker.link.failed("worse")
    assert (bad.reason, bad.retryable, bad.metadata["field"]) == ("MODEL_MISMATCH", True, "model_revision")
    assert (worse.reason, worse.retryable) == ("INTERNAL_ERROR", True)
    assert "defect" not in worse.message
    await worker.link.finished("good")
    assert worker.link.tokens("good") == continuation([1, 2], 6)
    await worker.until_idle()
    assert ("kv-bad-1", False) in worker.reader.released


async def test_a_step_without_its_shards_is_repeated_until_they_are_back(worker: Worker) -> None:
    worker.experts.failures = [ShardUnavailable("shard-1 is away") for _ in range(3)]
    worker.lease("a", [1, 2], max_tokens=6)
    worker.lease("b", [3], max_tokens=6)
    for name, prompt in (("a", [1, 2]), ("b", [3])):
        await worker.link.finished(name)
        assert worker.link.tokens(name) == continuation(prompt, 6)


async def test_shards_that_stay_away_fail_a_lease_before_its_deadline_by_name(worker: Worker) -> None:
    worker.experts.always = ShardUnavailable("no replica of expert 3")
    worker.lease("a", [1, 2], remaining_ms=600)
    failed = await worker.link.failed("a")
    assert (failed.reason, failed.retryable) == ("SHARD_UNAVAILABLE", True)
    worker.experts.always = None
    worker.lease("b", [1, 2], max_tokens=3)
    await worker.link.finished("b")
    assert worker.link.tokens("b") == continuation([1, 2], 3)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(NonFiniteValue("NaN", field="hidden"), "NON_FINITE_VALUE"), (RuntimeError("a defect"), "INTERNAL_ERROR")],
)
async def test_what_one_sequence_breaks_fails_only_that_one(worker: Worker, error: Exception, reason: str) -> None:
    def check(contexts: list[list[int]]) -> None:
        if any(13 in context for context in contexts):
            raise error

    worker.model.check = check
    prompts = {"a": [1, 2], "b": [4, 4, 4]}
    worker.lease("poison", [13], max_tokens=5)
    for name, prompt in prompts.items():
        worker.lease(name, prompt, max_tokens=4)
        assert 13 not in continuation(prompt, 4)
    failed = await worker.link.failed("poison")
    assert (failed.reason, failed.retryable) == (reason, False)
    for name, prompt in prompts.items():
        await worker.link.finished(name)
        assert worker.link.tokens(name) == continuation(prompt, 4)
    await worker.until_idle()


async def test_more_leases_than_credit_are_refused(start_worker: StartWorker) -> None:
    async with start_worker(max_batch=1, max_waiting=1) as worker:
        worker.reader.gates["kv-a-1"] = asyncio.Event()
        worker.lease("a", [1])
        worker.lease("b", [1])
        assert worker.link.credit[0] == 0
        with pytest.raises(MeshfireError) as refused:
            worker.lease("c", [1])
        assert (refused.value.reason, refused.value.retryable) == ("QUEUE_FULL", True)


# --- test hooks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("so_far", [0, 2, 3])
async def test_a_script_replaces_the_choice_from_the_output_s_start_on(worker: Worker, so_far: int) -> None:
    script = [9, 8, 7]
    worker.lease(
        "a",
        [1, 2, *script[:so_far]],
        epoch=2,
        num_prompt_tokens=2,
        max_tokens=20,
        scripted=True,
        script_token_ids=script,
        script_ends_with_eos=True,
    )
    end = await worker.link.finished("a", epoch=2)
    assert worker.link.tokens("a", epoch=2) == script[so_far:]
    assert (end.finish_reason, end.stop_token_id) == (STOP, END_ID)


@pytest.mark.parametrize("script", [[], [9, 8]])
async def test_a_script_may_end_for_its_length(worker: Worker, script: list[int]) -> None:
    worker.lease("a", [1, 2], max_tokens=20, scripted=True, script_token_ids=script)
    end = await worker.link.finished("a")
    assert worker.link.tokens("a") == script
    assert end.finish_reason == LENGTH


async def test_a_scripted_token_has_its_own_log_probability(worker: Worker) -> None:
    likely = continuation([1, 2], 1)[0]
    worker.lease("a", [1, 2], max_tokens=1, scripted=True, script_token_ids=[likely + 1], sampling={"num_logprobs": 1})
    await worker.link.finished("a")
    (logprobs,) = worker.link.progress("a")[0].logprobs
    assert list(logprobs.top_ids) == [likely]
    # FakeModel's logits fall by 1 at a distance of 1.
    assert logprobs.logprob == pytest.approx(logprobs.top_logprobs[0] - 1.0, abs=1e-4)


async def test_a_kill_strikes_right_before_its_token_is_sent(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    sent_before: list[int] = []
    monkeypatch.setattr(faults.os, "kill", lambda pid, signal: sent_before.append(len(worker.link.progress("a"))))
    worker.lease("a", [1, 2], max_tokens=6, fault="decode:kill@token=3")
    await worker.link.finished("a")
    assert sent_before == [3]


async def test_a_delay_holds_a_token_back_once(worker: Worker) -> None:
    worker.lease("a", [1, 2], max_tokens=4, fault="decode:delay=50ms@token=2")
    await worker.link.finished("a")
    assert worker.link.tokens("a") == continuation([1, 2], 4)


async def test_a_fault_for_another_instance_or_role_does_nothing(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(pid: int, signal: int) -> None:
        raise AssertionError("struck")

    monkeypatch.setattr(faults.os, "kill", never)
    worker.lease("a", [1], max_tokens=2, fault="decode-1:kill")
    worker.lease("b", [1], max_tokens=2, fault="prefill:kill")
    await worker.link.finished("a")
    await worker.link.finished("b")


# --- traces -----------------------------------------------------------------------------------------------------------


async def test_a_lease_is_on_its_request_s_trace_with_what_it_took(worker: Worker) -> None:
    parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    worker.lease("a", [1, 2, 3, 4, 5], max_tokens=5, traceparent=parent)
    await worker.link.finished("a")
    worker.telemetry.flush()
    spans = {span.name: span for span in worker.spans.get_finished_spans()}
    lease, read, steps = spans["decode.lease"], spans["decode.read_kv"], spans["decode.steps"]
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {"ab" * 16}
    assert f"{lease.parent.span_id:016x}" == "cd" * 8
    assert read.parent.span_id == steps.parent.span_id == lease.context.span_id
    assert lease.attributes["meshfire.tokens.output"] == steps.attributes["meshfire.steps"] == 5
    assert lease.attributes["meshfire.kv.bytes"] == read.attributes["meshfire.kv.bytes"] == 2 * P * 16
    (event,) = steps.events
    assert event.attributes["meshfire.shard.id"] == "shard-0"
    assert event.attributes["meshfire.expert.hops"] == 4  # the first token needs no step of the model
    assert len(worker.experts.finished) == 1
    assert all(worker.experts.finished[0] in one for one in worker.experts.traceparents)


async def test_the_metrics_tell_steps_tokens_and_who_is_here(worker: Worker) -> None:
    worker.lease("a", [1, 2], max_tokens=3)
    await worker.link.finished("a")
    text = worker.telemetry.prometheus_text().decode()
    assert "meshfire_decode_tokens_total 3.0" in text.replace('{otel_scope_name="meshfire"}', "")
    assert "meshfire_decode_step_duration" in text
