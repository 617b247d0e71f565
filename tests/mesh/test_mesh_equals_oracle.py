"""The mesh computes what `transformers` computes: tokens and log-probabilities of prefill and 32 decode steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshfire.client import Sampling
from meshfire.testing.in_process import InProcessModel
from tests import oracles
from tests.mesh.asking import ask
from tests.mesh.harness import in_process_mesh

NUM_TOKENS = 33  # one from the prompt's logits, 32 decode steps
NUM_LOGPROBS = 20

CASES: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    ("llama, whole FFNs", oracles.make_llama_checkpoint, {}, {"expert_shards": 0}),
    (
        "llama, 3 slices on 2 shards",
        oracles.make_llama_checkpoint,
        {"seed": 3},
        {"expert_shards": 2, "dense_slices": 3},
    ),
    ("kimi, 2 shards", oracles.make_deepseek_checkpoint, {}, {"expert_shards": 2}),
    (
        "kimi, groups, 3 shards, dense layer in slices",
        oracles.make_deepseek_checkpoint,
        {"seed": 4, "n_group": 4, "topk_group": 2, "rope_parameters": oracles.YARN},
        {"expert_shards": 3, "dense_slices": 2, "prefill": 2},
    ),
]


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, num_logprobs=NUM_LOGPROBS)


@pytest.mark.parametrize(("make", "overrides", "counts"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
async def test_tokens_and_logprobs_through_the_mesh_equal_transformers(
    make: Any, overrides: dict[str, Any], counts: dict[str, Any], tmp_path: Path
) -> None:
    directory = make(tmp_path / "model", **overrides)
    prompt = prompt_of(37, seed=1)
    expected_ids, logits = oracles.oracle_greedy(oracles.load_oracle(directory), prompt, NUM_TOKENS)
    expected = logits.log_softmax(-1)
    async with in_process_mesh({"m": directory}, **counts) as mesh:
        answer = await ask(mesh, prompt, GREEDY)
        again = await ask(mesh, prompt, GREEDY)
    assert answer.token_ids == expected_ids
    finished = answer.finished
    assert (finished.finish_reason, finished.usage.num_prompt_tokens) == ("length", len(prompt))
    got = [one for delta in answer.deltas for one in delta.logprobs]
    tolerance = 1e-4 * float(logits.abs().max())
    for step, (token, one) in enumerate(zip(expected_ids, got, strict=True)):
        torch.testing.assert_close(one.logprob, float(expected[step, token]), rtol=0, atol=tolerance)
        at_top = expected[step, list(one.top_ids)]
        torch.testing.assert_close(torch.tensor(one.top_logprobs), at_top, rtol=0, atol=tolerance)
        assert len(one.top_ids) == NUM_LOGPROBS
    assert again.token_ids == expected_ids, "a cached prefix changes nothing"
    assert counts.get("prefill", 1) > 1 or again.finished.usage.num_cached_tokens > 0


async def test_the_mesh_gives_the_same_bits_as_one_process_for_any_number_of_shards_and_ranks(tmp_path: Path) -> None:
    directory = oracles.make_deepseek_checkpoint(tmp_path / "model", seed=9)
    prompt = prompt_of(20, seed=2)
    steps = InProcessModel(directory).logits([prompt], 12)
    # float64 as in the sampler, rounded once to the wire's float32: equal only if all logits are equal bit for bit
    expected = [float(one.double().log_softmax(-1).max().float()) for one in steps]
    for counts in (
        {"expert_shards": 1},
        {"expert_shards": 3},
        {"expert_shards": 2, "tensor_parallel": 2, "decode": 2},
    ):
        async with in_process_mesh({"m": directory}, **counts) as mesh:
            sampling = Sampling(max_tokens=12, temperature=0, ignore_eos=True, num_logprobs=0)
            answer = await ask(mesh, prompt, sampling)
        assert answer.logprobs == expected


async def test_two_models_side_by_side_do_not_mix(tmp_path: Path) -> None:
    llama = oracles.make_llama_checkpoint(tmp_path / "llama")
    kimi = oracles.make_deepseek_checkpoint(tmp_path / "kimi")
    prompt = prompt_of(9, seed=3)
    sampling = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
    async with in_process_mesh({"a": llama, "b": kimi}, expert_shards=1, dense_slices=1) as mesh:
        for name, directory in (("a", llama), ("b", kimi)):
            answer = await ask(mesh, prompt, sampling, model=name)
            expected, _ = oracles.oracle_greedy(oracles.load_oracle(directory), prompt, 8)
            assert answer.token_ids == expected
        assert [one.name for one in await mesh.client.list_models()] == ["a", "b"]
