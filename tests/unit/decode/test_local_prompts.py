"""Leases without KV: the prompt is computed beside the running batch, and nothing but the KV's way is different."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.message import Message

from meshfire.api.common.v1 import sampling_pb2
from meshfire.api.router.v1 import work_service_pb2 as pb
from meshfire.errors import BadInput, NonFiniteValue, ShardUnavailable
from meshfire.kv.hashing import chain_hashes
from meshfire.sched.parts import ChunkBudget
from tests.unit.decode.conftest import StartWorker, Worker
from tests.unit.decode.fakes import P, continuation

SEEDED = {"temperature": 4.0, "seed": 7, "repetition_penalty": 1.3, "num_logprobs": 2}
LENGTH = sampling_pb2.FINISH_REASON_LENGTH
PROMPT = [random.Random(5).randrange(30) for _ in range(22)]


def told(worker: Worker, kind: str) -> list[Any]:
    """What routers were told of this kind, in order."""
    found: list[Message] = [getattr(one, kind) for _, one in worker.link.sent if one.WhichOneof("message") == kind]
    return found


def shared(worker: Worker, token_ids: list[int], salt: str = "") -> int:
    """Leading blocks of `token_ids` that the pool can share."""
    return worker.pool.num_matched(chain_hashes(token_ids, P, model_revision="rev", cache_salt=salt))


async def test_a_prompt_is_computed_in_chunks_and_gives_the_oracle_s_tokens(worker: Worker) -> None:
    worker.lease("a", PROMPT, local=True, max_tokens=6)
    end = await worker.link.finished("a")
    assert worker.link.tokens("a") == continuation(PROMPT, 6)
    assert (end.finish_reason, end.kv_bytes) == (LENGTH, 0)
    assert worker.model.chunks == [[5], [5], [5], [5], [2], *([[1]] * 5)]
    assert worker.reader.released == []
    await worker.until_idle()


async def test_running_streams_get_a_token_in_every_step_beside_a_bounded_chunk(start_worker: StartWorker) -> None:
    async with start_worker(budget=ChunkBudget(beside_others=2, alone=50)) as worker:
        worker.lease("stream", [1, 2], max_tokens=40)
        await worker.link.until(lambda: len(worker.link.progress("stream")) > 2)
        worker.lease("late", PROMPT, local=True, max_tokens=3)
        await worker.link.finished("late")
        await worker.link.finished("stream")
    mixed = [chunks for chunks in worker.model.chunks if max(chunks) > 1]
    assert mixed == [[1, 2]] * 10 + [[1, 2]]
    assert worker.link.tokens("late") == continuation(PROMPT, 3)
    assert worker.link.tokens("stream") == continuation([1, 2], 40)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 4.0, "seed": 7, "repetition_penalty": 1.3, "num_logprobs": 2}]
)
async def test_tokens_log_probabilities_and_shared_blocks_are_those_of_a_lease_with_kv(
    start_worker: StartWorker, sampling: dict[str, Any]
) -> None:
    outcomes = []
    for local in (False, True):
        async with start_worker() as worker:
            worker.lease("a", PROMPT, local=local, max_tokens=9, sampling=sampling)
            await worker.link.finished("a")
            tokens = worker.link.tokens("a")
            hashes = chain_hashes([*PROMPT, *tokens], P, model_revision="rev")
            blocks = worker.pool.match(hashes)
            rows = [worker.engine._stepper.store.export_block(block).tolist() for block in blocks]
            worker.pool.release(blocks)
            scores = [list(one.logprobs) for one in worker.link.progress("a")]
            outcomes.append((tokens, scores, rows))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][2]) == (len(PROMPT) + 8) // P


async def test_a_prefix_found_here_is_not_computed_and_told_as_cached(worker: Worker) -> None:
    worker.lease("before", PROMPT, max_tokens=1)
    await worker.link.finished("before")
    worker.lease("after", [*PROMPT[:13], 30, 31], local=True, max_tokens=2)
    await worker.link.finished("after")
    (computed,) = told(worker, "prompt_computed")
    assert (computed.request_id, computed.epoch, computed.num_cached_tokens) == ("after", 1, 12)
    assert worker.model.chunks[0] == [3]
    kinds = [message.WhichOneof("message") for _, message in worker.link.sent]
    assert kinds.index("prompt_computed") < kinds.index("progress", kinds.index("finished"))


async def test_a_whole_cached_prompt_still_computes_its_last_token(worker: Worker) -> None:
    for name in ("a", "b"):
        worker.lease(name, PROMPT[:8], local=True, max_tokens=2)
        await worker.link.finished(name)
        assert worker.link.tokens(name) == continuation(PROMPT[:8], 2)
    assert [one.num_cached_tokens for one in told(worker, "prompt_computed")] == [0, 4]


async def test_a_follow_up_turn_finds_the_blocks_of_the_output(worker: Worker) -> None:
    worker.lease("turn-1", [1, 2, 3], local=True, max_tokens=12)
    await worker.link.finished("turn-1")
    so_far = [1, 2, 3, *worker.link.tokens("turn-1")]
    assert shared(worker, so_far) == 14 // P, "the last token's KV was never computed"
    worker.lease("turn-2", [*so_far, 9], local=True, max_tokens=2)
    await worker.link.finished("turn-2")
    assert told(worker, "prompt_computed")[1].num_cached_tokens == 12
    assert worker.link.tokens("turn-2") == continuation([*so_far, 9], 2)


async def test_equal_prompts_are_computed_once(worker: Worker) -> None:
    """n choices are n leases of one prompt."""
    for index in range(4):
        sampling = {"temperature": 3.0, "seed": index}
        worker.lease(f"c{index}", PROMPT, local=True, max_tokens=5, sampling=sampling)
    for index in range(4):
        await worker.link.finished(f"c{index}")
    whole_blocks = len(PROMPT) // P * P
    computed = sum(sum(step) for step in worker.model.chunks)
    # Once together, then each its last partial block and four steps.
    assert computed == whole_blocks + 4 * (len(PROMPT) - whole_blocks) + 4 * 4


async def test_other_salts_are_computed_apart(worker: Worker) -> None:
    for salt in ("mine", "yours"):
        worker.lease(salt, PROMPT, local=True, max_tokens=1, cache_salt=salt)
        await worker.link.finished(salt)
    assert [one.num_cached_tokens for one in told(worker, "prompt_computed")] == [0, 0]


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_a_prompt_is_scored_whatever_is_cached(worker: Worker, max_tokens: int) -> None:
    worker.lease("before", PROMPT, max_tokens=1)
    await worker.link.finished("before")
    worker.lease("a", PROMPT, local=True, max_tokens=max_tokens, num_prompt_logprobs=2)
    assert (await worker.link.finished("a")).finish_reason == LENGTH
    assert worker.link.tokens("a") == continuation(PROMPT, max_tokens)
    parts = told(worker, "prompt_logprobs")
    assert [one.first_index for one in parts] == [1, 6, 11, 16, 21]
    scores = [one for part in parts for one in part.logprobs]
    assert len(scores) == len(PROMPT) - 1
    for place, one in enumerate(scores, start=1):
        assert one.top_ids[0] == continuation(PROMPT[:place], 1)[0]
        assert (one.logprob == one.top_logprobs[0]) == (PROMPT[place] == one.top_ids[0])
    assert told(worker, "prompt_computed")[-1].num_cached_tokens == 0


async def test_a_prompt_that_is_all_that_is_wanted_is_computed_and_shared(worker: Worker) -> None:
    worker.lease("a", PROMPT, local=True, max_tokens=0)
    assert (await worker.link.finished("a")).finish_reason == LENGTH
    assert worker.link.tokens("a") == []
    assert shared(worker, PROMPT) == len(PROMPT) // P


async def test_a_later_epoch_goes_on_with_the_tokens_so_far(worker: Worker) -> None:
    whole = continuation(PROMPT, 9)
    tokens = [*PROMPT, *whole[:4]]
    worker.lease("a", tokens, local=True, epoch=2, num_prompt_tokens=len(PROMPT), max_tokens=9, num_prompt_logprobs=0)
    await worker.link.finished("a", epoch=2)
    assert worker.link.tokens("a", epoch=2) == whole[4:]
    assert sum(len(part.logprobs) for part in told(worker, "prompt_logprobs")) == len(PROMPT) - 1


async def test_a_cancel_in_the_middle_of_a_prompt_frees_its_blocks(worker: Worker) -> None:
    worker.model.may_run.clear()
    worker.lease("a", PROMPT, local=True)
    await worker.until_entered()
    worker.engine.on_cancel("router-0", "a", 1)
    assert worker.pool.num_free < worker.pool.num_blocks, "the chunk still writes to them"
    worker.model.may_run.set()
    await worker.until_idle()


async def test_a_chunk_without_its_shards_is_repeated(worker: Worker) -> None:
    worker.experts.failures = [ShardUnavailable("shard-1 is away") for _ in range(2)]
    worker.lease("a", PROMPT, local=True, max_tokens=3)
    await worker.link.finished("a")
    assert worker.link.tokens("a") == continuation(PROMPT, 3)


async def test_a_prompt_that_breaks_the_step_fails_alone(worker: Worker) -> None:
    def check(contexts: list[list[int]]) -> None:
        if any(13 in context for context in contexts):
            raise NonFiniteValue("NaN", field="hidden")

    worker.model.check = check
    worker.lease("good", [1, 2], max_tokens=8)
    worker.lease("bad", [7] * 5 + [13] * 9, local=True)
    failed = await worker.link.failed("bad")
    assert (failed.reason, failed.retryable) == ("NON_FINITE_VALUE", False)
    await worker.link.finished("good")
    assert worker.link.tokens("good") == continuation([1, 2], 8)
    assert shared(worker, [7] * 5 + [13] * 9) <= 1
    await worker.until_idle()


@pytest.mark.parametrize(
    ("work", "field"),
    [
        ({"kv_lease_id": "kv"}, "kv_address"),
        ({"kv_address": "prefill:1"}, "kv_lease_id"),
        ({"kv_lease_id": "kv", "kv_address": "prefill:1", "num_prompt_logprobs": 1}, "num_prompt_logprobs"),
    ],
)
async def test_half_a_source_is_refused_by_name(worker: Worker, work: dict[str, Any], field: str) -> None:
    params = sampling_pb2.SamplingParams(max_tokens=1, seed=1)
    decode = pb.DecodeWork(token_ids=[1], num_prompt_tokens=1, sampling=params, **work)
    with pytest.raises(BadInput) as refused:
        worker.engine.on_lease("router-0", pb.Lease(request_id="a", epoch=1, remaining_ms=1000, decode=decode))
    assert refused.value.field == field
