"""Prompts that decode computes itself: the same streams as with prefill workers, and who computes what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshfire.client import PromptPart, Sampling
from tests import oracles
from tests.mesh.asking import Answer, ask, post
from tests.mesh.harness import InProcessMesh, in_process_mesh
from tests.mesh.test_mesh_equals_oracle import prompt_of

BLOCK_TOKENS = 16
PROMPT = prompt_of(70, seed=8)
#: temperature, truncation, penalties and log-probabilities at once
SEEDED = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.4, "seed": 11}
CHECKPOINTS: list[tuple[Any, dict[str, Any]]] = [
    (oracles.make_llama_checkpoint, {"expert_shards": 0}),
    (oracles.make_deepseek_checkpoint, {"expert_shards": 2}),
]


def outcome(answer: Answer) -> tuple[Any, ...]:
    """Everything that must not depend on who computed the prompt."""
    top = [(one.logprob, one.top_ids, one.top_logprobs) for delta in answer.deltas for one in delta.logprobs]
    return answer.token_ids, answer.text, top, answer.finished.finish_reason


async def streams(mesh: InProcessMesh) -> list[Any]:
    """One of each kind."""
    greedy = Sampling(max_tokens=20, temperature=0, ignore_eos=True, num_logprobs=5)
    seeded = Sampling(max_tokens=40, num_logprobs=3, min_tokens=5, **SEEDED)
    found: list[Any] = [
        outcome(await ask(mesh, prompt, sampling))
        for prompt in (PROMPT[:1], PROMPT[:32], PROMPT, PROMPT[:50] + PROMPT[:20])
        for sampling in (greedy, seeded)
    ]
    scored = Sampling(max_tokens=3, temperature=0, num_prompt_logprobs=2)
    events = [one async for one in mesh.client.generate("m", PROMPT, scored, echo=True, timeout_s=40)]
    found.append([(one.text, one.logprobs) for one in events if isinstance(one, PromptPart)])
    return found


async def choices(mesh: InProcessMesh) -> list[Any]:
    """n outputs, and a prompt that is scored with nothing after it."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 12, "n": 3, "logprobs": 2, **SEEDED}
    one = (await post(mesh, "/v1/completions", json=body)).json()
    two = (await post(mesh, "/v1/completions", json={**body, "n": 1, "echo": True, "max_tokens": 0})).json()
    return [one["choices"], two["choices"], one["usage"]["prompt_tokens"], two["usage"]]


@pytest.mark.parametrize(("make", "counts"), CHECKPOINTS, ids=["llama", "kimi, 2 shards"])
async def test_streams_without_prefill_workers_are_those_with_them(
    make: Any, counts: dict[str, Any], tmp_path: Path
) -> None:
    directory = make(tmp_path / "model")
    found = []
    for prefill in (1, 0):
        async with in_process_mesh({"m": directory}, prefill=prefill, decode=1, **counts) as mesh:
            found.append([await streams(mesh), await choices(mesh)])
            names = {one.resource.attributes["service.name"] for one in mesh.spans.ended}
    assert found[0] == found[1]
    assert not any("prefill" in str(name) for name in names)


async def test_speculation_changes_no_stream(tmp_path: Path) -> None:
    directory = oracles.make_deepseek_checkpoint(tmp_path / "model")
    found = []
    for speculation in ("off", "prompt-lookup"):
        async with in_process_mesh({"m": directory}, speculation=speculation, prefill=0) as mesh:
            found.append(await streams(mesh))
    assert found[0] == found[1]


async def test_a_follow_up_turn_is_computed_where_its_prefix_is(tmp_path: Path) -> None:
    """Long prompts go to prefill; the next turn lacks little of what decode holds, its output included."""
    directory = oracles.make_llama_checkpoint(tmp_path / "model")
    sampling = Sampling(max_tokens=30, temperature=0, ignore_eos=True)
    expected = []
    for max_tokens in (0, 24):
        async with in_process_mesh({"m": directory}, decode=2, local_prefill_max_tokens=max_tokens) as mesh:
            first = await ask(mesh, PROMPT, sampling)
            assert first.finished.receipt.prefill_worker_id
            turn = [*PROMPT, *first.token_ids, 7, 8, 9]
            second = await ask(mesh, turn, sampling)
            expected.append((first.token_ids, second.token_ids))
            receipt, usage = second.finished.receipt, second.finished.usage
            assert bool(receipt.prefill_worker_id) == (max_tokens == 0)
            if max_tokens:
                held = (len(PROMPT) + 29) // BLOCK_TOKENS * BLOCK_TOKENS
                assert receipt.decode_worker_id == first.finished.receipt.decode_worker_id
                assert (usage.num_cached_tokens, receipt.num_cached_expected, receipt.kv_bytes) == (held, held, 0)
            short = await ask(mesh, PROMPT[:24], sampling)
            assert bool(short.finished.receipt.prefill_worker_id) == (max_tokens == 0)
    assert expected[0] == expected[1]
