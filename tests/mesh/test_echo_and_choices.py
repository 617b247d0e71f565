"""Echo with log-probabilities as evaluation harnesses ask for it, and n choices of one prompt, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from meshfire.client import Finished, PromptPart, Sampling
from meshfire.telemetry import names
from meshfire.text.tokenizer import load_tokenizer
from meshfire.worker import prompt_logprobs
from services.router import prompt_echo
from tests import oracles
from tests.mesh.asking import ask, post
from tests.mesh.harness import InProcessMesh, in_process_mesh

COMPLETIONS = "/v1/completions"
TEXT = "The quick brown fox jumps over the lazy dog. " * 3
BLOCK_TOKENS = 16  # the default of every worker
SAMPLED = {"model": "m", "temperature": 1.0, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracles.make_llama_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def mesh(checkpoint: Path) -> AsyncIterator[InProcessMesh]:
    async with in_process_mesh({"m": checkpoint}, test_hooks=True) as running:
        yield running


def expected_logprobs(checkpoint: Path, ids: Sequence[int]) -> torch.Tensor:
    """[T, V]: row i is of the token after the i-th."""
    return oracles.oracle_logits(oracles.load_oracle(checkpoint), ids).double().log_softmax(-1)


async def complete(mesh: InProcessMesh, **body: Any) -> dict[str, Any]:
    response = await post(mesh, COMPLETIONS, json={"model": "m"} | body)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


async def streamed(mesh: InProcessMesh, **body: Any) -> list[dict[str, Any]]:
    """Chunks, in order."""
    answer = await post(mesh, COMPLETIONS, json={"model": "m", "stream": True} | body)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def computed_tokens(mesh: InProcessMesh) -> int:
    """Prompt tokens that prefill workers have computed."""
    return sum(
        (one.attributes or {})[names.ATTR_CHUNK_TOKENS]  # type: ignore[misc]
        for one in mesh.spans.ended
        if one.name == names.SPAN_PREFILL_CHUNK
    )


# --- echo -------------------------------------------------------------------------------------------------------------


async def test_a_prompt_is_scored_as_transformers_does_warm_or_cold(mesh: InProcessMesh, checkpoint: Path) -> None:
    """The request of lm-evaluation-harness: context and continuation as one prompt, one token more, greedy."""
    ids = load_tokenizer(checkpoint).encode_plain(TEXT)
    expected = expected_logprobs(checkpoint, ids)
    own = expected[torch.arange(len(ids) - 1), ids[1:]]
    asked = {"echo": True, "logprobs": 2, "temperature": 0}
    await complete(mesh, prompt=ids, max_tokens=1)  # its blocks are cached now
    for prompt, max_tokens in ((ids, 1), (TEXT, 1), (ids, 0), (TEXT, 0)):
        answer = await complete(mesh, prompt=prompt, max_tokens=max_tokens, **asked)
        (choice,) = answer["choices"]
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(ids) + max_tokens
        assert "".join(logprobs["tokens"][: len(ids)]) == TEXT
        assert choice["text"].startswith(TEXT)
        assert choice["finish_reason"] == "length"
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        told = torch.tensor(logprobs["token_logprobs"][1 : len(ids)], dtype=torch.float64)
        torch.testing.assert_close(told, own, rtol=0, atol=1e-4)
        for place, top in enumerate(logprobs["top_logprobs"][1 : len(ids)]):
            best = max(top.values())
            assert best == pytest.approx(float(expected[place].max()), abs=1e-4)
            is_greedy = max(top, key=top.get) == logprobs["tokens"][place + 1]
            assert is_greedy == (int(expected[place].argmax()) == ids[place + 1])
        starts = logprobs["text_offset"]
        assert [choice["text"][at:].startswith(token) for at, token in zip(starts[: len(ids)], logprobs["tokens"])] == [
            True
        ] * len(ids)
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "scores are computed, not found"


async def test_echo_alone_computes_only_what_is_not_cached(mesh: InProcessMesh, checkpoint: Path) -> None:
    ids = load_tokenizer(checkpoint).encode_plain(TEXT)
    await complete(mesh, prompt=ids, max_tokens=1)
    for max_tokens in (0, 2):
        answer = await complete(mesh, prompt=ids, max_tokens=max_tokens, echo=True, temperature=0)
        assert answer["choices"][0]["text"].startswith(TEXT)
        assert answer["choices"][0]["logprobs"] is None
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert answer["usage"]["completion_tokens"] == max_tokens


@pytest.mark.parametrize("asked", [{"max_tokens": 3, "logprobs": 1}, {"max_tokens": 0}, {"max_tokens": 2, "n": 2}])
async def test_a_stream_with_echo_says_what_the_whole_answer_says(mesh: InProcessMesh, asked: dict[str, Any]) -> None:
    body = {"prompt": TEXT, "echo": True, "temperature": 0, "ignore_eos": True} | asked
    whole = await complete(mesh, **body)
    chunks = await streamed(mesh, **body)
    for choice in whole["choices"]:
        own = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"]
        assert own[0]["text"].startswith(TEXT)
        if choice["logprobs"] is not None:
            parts = [one["logprobs"] for one in own if one["logprobs"]]
            assert {key: [x for part in parts for x in part[key]] for key in parts[0]} == choice["logprobs"]
        assert own[-1]["finish_reason"] == "length"


async def test_a_long_prompt_is_told_in_parts_that_fit_together(
    mesh: InProcessMesh, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the last token of the context window, which an output would need."""
    monkeypatch.setattr(prompt_logprobs, "LOGPROBS_PER_MESSAGE", 77)
    monkeypatch.setattr(prompt_echo, "PART_TOKENS", 100)
    ids = torch.randint(0, 256, (512,), generator=torch.Generator().manual_seed(2)).tolist()
    expected = expected_logprobs(checkpoint, ids)
    sampling = Sampling(max_tokens=0, num_prompt_logprobs=0)
    events = [event async for event in mesh.client.generate("m", ids, sampling, timeout_s=40)]
    parts = [event for event in events if isinstance(event, PromptPart)]
    assert len(parts) == 6
    assert [token for part in parts for token in part.token_ids] == ids
    told = torch.tensor([one.logprob for part in parts for one in part.logprobs], dtype=torch.float64)
    torch.testing.assert_close(told, expected[torch.arange(len(ids) - 1), ids[1:]], rtol=0, atol=1e-4)
    assert isinstance(events[-1], Finished)
    assert events[-1].receipt.decode_worker_id == ""


# --- n choices --------------------------------------------------------------------------------------------------------


async def test_n_choices_are_seeded_and_each_can_be_had_alone(mesh: InProcessMesh, checkpoint: Path) -> None:
    ids = load_tokenizer(checkpoint).encode_plain(TEXT)
    asked = SAMPLED | {"prompt": ids, "max_tokens": 8, "return_token_ids": True}
    first = await complete(mesh, n=4, **asked)
    second = await complete(mesh, n=4, **asked)
    outputs = [choice["token_ids"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert len({tuple(one) for one in outputs}) == 4, "choices differ"
    assert [choice["token_ids"] for choice in second["choices"]] == outputs
    for index, output in enumerate(outputs):
        alone = await complete(mesh, **(asked | {"seed": 7 + index}))
        assert alone["choices"][0]["token_ids"] == output
    usage = first["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 32)
    assert usage["total_tokens"] == len(ids) + 32
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "nothing was there before this request"
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_n_choices_compute_their_prompt_once(mesh: InProcessMesh, checkpoint: Path) -> None:
    """But for the last token of each, whose hidden state nobody keeps, and the tokens of its block before it."""
    ids = load_tokenizer(checkpoint).encode_plain(TEXT)
    answer = await complete(mesh, **SAMPLED, prompt=ids, max_tokens=1, n=6)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    own = 1 + (len(ids) - 1) % BLOCK_TOKENS
    async with asyncio.timeout(20):  # spans are exported in batches
        while sum(one.name == names.SPAN_PREFILL_LEASE for one in mesh.spans.ended) < 6:
            await asyncio.sleep(0.05)
    assert computed_tokens(mesh) == len(ids) + 5 * own


async def test_a_stream_of_n_choices_carries_each_under_its_index(mesh: InProcessMesh) -> None:
    asked = SAMPLED | {"prompt": TEXT, "max_tokens": 6, "n": 4}
    whole = await complete(mesh, **asked)
    chunks = await streamed(mesh, **asked, stream_options={"include_usage": True})
    order = [one["index"] for chunk in chunks for one in chunk["choices"]]
    assert set(order) == {0, 1, 2, 3}
    assert order != sorted(order), "choices come as they grow, not one after the other"
    for choice in whole["choices"]:
        own = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"]
        assert [one["finish_reason"] for one in own][-1] == "length"
    assert chunks[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert chunks[-1]["usage"]["completion_tokens"] == 24


async def test_a_client_that_leaves_frees_all_its_choices(mesh: InProcessMesh) -> None:
    body = SAMPLED | {"prompt": TEXT, "max_tokens": 300, "n": 4, "stream": True}
    begun: set[int] = set()
    async with httpx.AsyncClient(timeout=40, trust_env=False) as client:
        async with client.stream("POST", f"{mesh.http_url}{COMPLETIONS}", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    begun |= {one["index"] for one in json.loads(line.removeprefix("data: "))["choices"]}
                if len(begun) == 4:  # every choice is being decoded
                    break
    async with asyncio.timeout(20):
        while len(spans := [one for one in mesh.spans.ended if one.name == names.SPAN_DECODE_LEASE]) < 4:
            await asyncio.sleep(0.05)
    assert all((one.attributes or {})[names.ATTR_TOKENS_OUTPUT] < 300 for one in spans)  # type: ignore[operator]
    again = await ask(mesh, TEXT, Sampling(max_tokens=2, temperature=0, ignore_eos=True))
    assert again.finished.usage.num_output_tokens == 2
