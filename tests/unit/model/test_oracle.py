"""Our logits equal those of `transformers` on the same files: prefill, chunked prefill, 32 greedy decode steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles import (
    YARN,
    load_oracle,
    make_deepseek_checkpoint,
    make_llama_checkpoint,
    make_mistral_checkpoint,
    oracle_greedy,
    oracle_logits,
)
from tests.unit.model.harness import Runner

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (make_llama_checkpoint, {}),
    "llama, one key head, tied": (make_llama_checkpoint, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama, a key head per head, own head_dim": (make_llama_checkpoint, {"num_key_value_heads": 4, "head_dim": 24}),
    "llama 3 rope": (make_llama_checkpoint, {"rope_parameters": LLAMA3}),
    "llama yarn": (make_llama_checkpoint, {"rope_parameters": {**YARN, "mscale": 0.0, "mscale_all_dim": 0.0}}),
    "llama, linear rope, attention bias": (
        make_llama_checkpoint,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, "attention_bias": True},
    ),
    "mistral, a window of 13": (make_mistral_checkpoint, {"sliding_window": 13}),
    "mistral, no window, own head_dim": (make_mistral_checkpoint, {"sliding_window": None, "head_dim": 24}),
    "deepseek": (make_deepseek_checkpoint, {}),
    "deepseek, group-limited gate": (make_deepseek_checkpoint, {"n_group": 4, "topk_group": 2}),
    "deepseek, direct queries, two shared": (make_deepseek_checkpoint, {"q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek yarn": (make_deepseek_checkpoint, {"rope_parameters": YARN}),
    "deepseek yarn, unequal mscale": (make_deepseek_checkpoint, {"rope_parameters": {**YARN, "mscale": 0.707}}),
    "deepseek, uneven heads, raw weights": (
        make_deepseek_checkpoint,
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "v_head_dim": 24,
            "norm_topk_prob": False,
            "n_group": 8,
            "topk_group": 3,
            "rope_interleave": False,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_of_prefill_chunks_and_32_decode_steps_equal_transformers(case: str, tmp_path: Path) -> None:
    make, overrides = CASES[case]
    directory = make(tmp_path, seed=len(case), **overrides)
    oracle, runner = load_oracle(directory), Runner.open(directory)
    prompt = torch.randint(0, 512, (45,), generator=torch.Generator().manual_seed(1)).tolist()
    tokens, expected_steps = oracle_greedy(oracle, prompt, 32)
    steps = runner.decode(prompt, tokens)
    assert_close(steps, expected_steps)
    assert steps.argmax(-1).tolist() == tokens
    expected = oracle_logits(oracle, prompt)
    for chunk in (45, 16, 7):
        assert_close(runner.prefill(prompt, chunk), expected)


@pytest.mark.parametrize("make", [make_llama_checkpoint, make_deepseek_checkpoint])
@pytest.mark.parametrize("dense_slices", [1, 5])
def test_sliced_dense_ffns_give_the_same_logits(make: Any, dense_slices: int, tmp_path: Path) -> None:
    directory = make(tmp_path)
    prompt = list(range(7, 40))
    runner = Runner.open(directory, dense_slices=dense_slices)
    assert_close(runner.prefill(prompt, 20), oracle_logits(load_oracle(directory), prompt))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """1e-4 relative to the largest logit of the row."""
    error = (actual - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert actual.shape == expected.shape
    assert error.max() < 1e-4, f"relative error {error.max():.2e}"
