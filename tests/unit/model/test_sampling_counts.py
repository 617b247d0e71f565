"""Counts kept step by step are those made at once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfire.model.sampling import SamplingParams, SamplingRow, sample
from meshfire.model.sampling_counts import TokenCounts

TOKENS = st.lists(st.integers(0, 60), max_size=80)


def seen(counts: TokenCounts) -> dict[int, int]:
    return dict(zip(counts.ids.tolist(), counts.output_counts.tolist(), strict=True))


@given(TOKENS, TOKENS, st.lists(st.integers(0, 80), max_size=8))
def test_counts_kept_over_steps_equal_counts_made_anew(prompt: list[int], output: list[int], steps: list[int]) -> None:
    kept = TokenCounts(prompt)
    for length in sorted(min(step, len(output)) for step in steps):
        kept.catch_up(output[:length])
        kept.catch_up(output[:length])  # a step that is run again
    kept.catch_up(output)
    expected = dict.fromkeys(prompt, 0) | Counter(output)
    assert seen(kept) == seen(TokenCounts(prompt, output)) == expected
    assert kept.num_output_tokens == len(output)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_kept_counts_chooses_as_one_without(temperature: float) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=temperature, repetition_penalty=1.5, frequency_penalty=0.7, seed=3)
    prompt, output = (1, 2, 3), [4, 4, 5, 1]
    counts = TokenCounts(prompt)
    for length in range(len(output) + 1):
        counts.catch_up(output[:length])
        with_counts = SamplingRow(params, 3 + length, prompt, output[:length], counts=counts)
        assert sample(logits, [with_counts]) == sample(
            logits, [SamplingRow(params, 3 + length, prompt, output[:length])]
        )
