"""Sampling: distribution, truncation, penalties, independence of the batch, and reproducibility."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfire.errors import BadInput, NonFiniteValue
from meshfire.model.noise import gumbel
from meshfire.model.sampling import Sampled, SamplingParams, SamplingRow, sample

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0, 0.0])


def row(position: int = 10, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), position, prompt, output)


def choose(logits: torch.Tensor, one: SamplingRow) -> Sampled:
    return sample(logits[None], [one])[0]


def frequencies(logits: torch.Tensor, num_draws: int, **params: Any) -> np.ndarray:
    rows = [row(position, seed=7, **params) for position in range(num_draws)]
    drawn = [one.token_id for one in sample(logits.expand(num_draws, -1), rows)]
    return np.bincount(drawn, minlength=len(logits))


def philox4x64(counter: int, key: tuple[int, int]) -> list[int]:
    """The published algorithm, ten rounds, in plain integers."""
    first, second, third, fourth = counter, 0, 0, 0
    left, right = key
    mask = 2**64 - 1
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * first, 0xCA5A826395121157 * third
        first, second, third, fourth = (
            (high >> 64) ^ second ^ left,
            high & mask,
            (low >> 64) ^ fourth ^ right,
            low & mask,
        )
        left, right = (left + 0x9E3779B97F4A7C15) & mask, (right + 0xBB67AE8584CAA73B) & mask
    return [first, second, third, fourth]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 2.5}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 3}, [1, 2, 3]),
        ({"top_p": 0.9}, [1, 2, 3]),
        ({"min_p": 0.2}, [1, 2, 3]),
        ({"top_k": 4, "top_p": 0.99, "min_p": 0.1}, [0, 1, 2, 3]),
    ],
)
def test_draws_follow_the_softmax_of_the_kept_tokens(params: dict[str, Any], kept: list[int]) -> None:
    num_draws = 4000
    counts = frequencies(LOGITS, num_draws, **params)
    weights = np.exp(LOGITS.double().numpy() / params.get("temperature", 1.0))
    expected = num_draws * np.where(np.isin(np.arange(6), kept), weights, 0) / weights[kept].sum()
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < 20.5  # 99.9th percentile for 5 degrees of freedom; the seed is fixed


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    assert choose(LOGITS, row(temperature=0.0)).token_id == 1


def test_top_k_keeps_the_lowest_ids_of_equal_logits() -> None:
    flat = torch.zeros(50)
    assert set(np.flatnonzero(frequencies(flat, 300, top_k=3))) == {0, 1, 2}


def test_top_p_keeps_one_token_that_reaches_it_alone() -> None:
    assert np.flatnonzero(frequencies(torch.tensor([0.0, 5.0, 0.0]), 200, top_p=0.5)).tolist() == [1]


def test_top_p_over_a_flat_vocabulary_keeps_its_share() -> None:
    counts = frequencies(torch.zeros(3000), 3000, top_p=0.5)
    assert np.flatnonzero(counts).max() in range(1400, 1501)


@given(st.integers(0, 2**63), st.integers(0, 10**6), st.lists(st.integers(0, 5), max_size=6))
def test_a_choice_does_not_depend_on_its_batch(seed: int, position: int, output: list[int]) -> None:
    one = row(position, (1, 2), tuple(output), seed=seed, repetition_penalty=1.2, frequency_penalty=0.5, top_p=0.95)
    others = [row(position, seed=seed + 1, top_k=2), one, row(position + 1, seed=seed, temperature=0.0)]
    batch = torch.stack([LOGITS * 2, LOGITS, -LOGITS])
    assert sample(batch, others)[1] == choose(LOGITS, one)


def test_truncation_does_not_move_the_noise_of_the_tokens_it_keeps() -> None:
    ids = np.array([3, 70, 999])
    assert (gumbel(5, 9, 1000, ids) == gumbel(5, 9, 1000, np.arange(1000))[ids]).all()


def test_noise_differs_by_seed_and_by_position_and_is_stable() -> None:
    ids = np.arange(4)
    first = gumbel(1, 2, 4, ids)
    words = philox4x64(counter=1, key=(1, 2))  # numpy counts up before the first block
    assert first == pytest.approx([-math.log(-math.log((word >> 12) / 2**52)) for word in words])
    assert not np.any(first == gumbel(2, 1, 4, ids))
    assert not np.any(first == gumbel(1, 3, 4, ids))
    assert not np.any(gumbel(-1, 0, 4, ids) == gumbel(1, 0, 4, ids))


def test_penalties_and_bias_act_as_defined() -> None:
    # token 1, out twice: 3/1.5 - 2·0.25 - 0.125 = 1.375; token 3, in the prompt: 3/1.5 = 2; token 2, unseen: 2
    params = {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": 0.125}
    assert choose(LOGITS, row(prompt=(3,), output=(1, 1), **params)).token_id == 2
    assert choose(LOGITS, row(output=(1,), temperature=0.0, presence_penalty=0.01)).token_id == 3
    assert choose(LOGITS, row(temperature=0.0, logit_bias={4: 4.5})).token_id == 4


def test_end_tokens_wait_for_min_tokens() -> None:
    held = {"temperature": 0.0, "min_tokens": 2, "end_token_ids": (1,), "stop_token_ids": (3,)}
    assert choose(LOGITS, row(output=(0,), **held)).token_id == 2
    assert choose(LOGITS, row(output=(0, 0), **held)).token_id == 1


def test_logprobs_are_those_of_the_plain_softmax() -> None:
    chosen = choose(LOGITS, row(temperature=0.0, num_logprobs=3, logit_bias={5: 50.0}))
    expected = torch.log_softmax(LOGITS.double(), dim=0)
    assert chosen.token_id == 5
    assert chosen.logprob == pytest.approx(float(expected[5]))
    assert chosen.top_ids == (1, 3, 2)
    assert chosen.top_logprobs == pytest.approx(expected[[1, 3, 2]].tolist())
    assert choose(LOGITS, row()).top_ids == ()


def test_banned_tokens_are_never_drawn_even_if_top_k_reaches_them() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0])
    assert set(np.flatnonzero(frequencies(logits, 200, top_k=3))) == {1, 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    with pytest.raises(NonFiniteValue):
        choose(torch.tensor([0.0, bad]), row())
    with pytest.raises(NonFiniteValue):
        choose(torch.full((3,), -math.inf), row())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("num_logprobs", 21),
        ("max_tokens", 0),
    ],
)
def test_a_parameter_out_of_range_is_named(field: str, value: float) -> None:
    with pytest.raises(BadInput) as raised:
        SamplingParams(**{field: value})
    assert raised.value.field == field


def test_a_token_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(BadInput):
        choose(LOGITS, row(logit_bias={6: 1.0}))
