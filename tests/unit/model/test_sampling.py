"""Sampling: truncation, penalties, masks, and independence of the batch. Distributions have a file of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfire.errors import BadInput, NonFiniteValue
from meshfire.model import sampling
from meshfire.model.sampling import Sampled, SamplingParams, SamplingRow, TokenLogprobs, sample

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0, 0.0])


def row(position: int = 10, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), position, prompt, output)


def choose(logits: torch.Tensor, one: SamplingRow) -> Sampled:
    return sample(logits[None], [one])[0]


def frequencies(logits: torch.Tensor, num_draws: int, **params: Any) -> np.ndarray:
    rows = [row(position, seed=7, **params) for position in range(num_draws)]
    drawn = [one.token_id for one in sample(logits.expand(num_draws, -1), rows)]
    return np.bincount(drawn, minlength=len(logits))


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


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 5.0, 1e-40]),
        "top_p": st.sampled_from([1.0, 0.95, 0.3]),
        "top_k": st.sampled_from([0, 1, 5, 10_000]),
        "min_p": st.sampled_from([0.0, 0.02, 1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 1e-40]),
        "logit_bias": st.sampled_from([{}, {3: 2.0}]),
        "min_tokens": st.sampled_from([0, 4]),
        "end_token_ids": st.just((2,)),
        "num_logprobs": st.sampled_from([None, 0, 3]),
        "seed": st.integers(-(2**63), 2**64 - 1),
    }
)


@settings(max_examples=60)
@given(st.data(), st.sampled_from([7, 64, 1501, 4099]), st.integers(1, 6))
def test_a_choice_is_bit_equal_alone_and_in_any_batch(data: st.DataObject, vocab: int, size: int) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    logits = torch.randn(size, vocab, generator=generator) * data.draw(st.sampled_from([0.01, 1.0, 6.0]))
    mask = torch.rand(vocab, generator=generator).numpy() < 0.8
    mask[1] = True
    rows = [
        SamplingRow(
            SamplingParams(**data.draw(PARAMS)),
            data.draw(st.integers(0, 10**6)),
            data.draw(st.lists(st.integers(0, 6), max_size=4)),
            data.draw(st.lists(st.integers(0, 6), max_size=6)),
            data.draw(st.sampled_from([None, mask])),
        )
        for _ in range(size)
    ]
    before = logits.clone()
    together = sample(logits, rows)
    assert torch.equal(logits, before), "the caller's logits are not changed"
    assert together == [choose(logits[index], one) for index, one in enumerate(rows)]
    assert sample(logits.flip(0), rows[::-1]) == together[::-1]


def test_a_batch_above_the_block_s_size_is_cut_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(1))
    rows = [row(seed=index, temperature=index % 2, presence_penalty=0.5, output=(1, 2)) for index in range(9)]
    whole = sample(logits, rows)
    monkeypatch.setattr(sampling, "_BLOCK_ELEMENTS", 120)
    assert sample(logits, rows) == whole


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
def test_tokens_that_cannot_win_are_left_out_without_a_trace(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 5000, generator=generator) * 4
    rows = [row(seed=index, temperature=temperature) for index in range(40)]
    pruned = sample(logits, rows)
    monkeypatch.setattr(sampling, "_WORTH_PRUNING", 10**9)
    assert sample(logits, rows) == pruned


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
    assert chosen.logprobs is not None
    assert chosen.logprobs.logprob == pytest.approx(float(expected[5]))
    assert chosen.logprobs.top_ids == (1, 3, 2)
    assert chosen.logprobs.top_logprobs == pytest.approx(expected[[1, 3, 2]].tolist())
    assert choose(LOGITS, row()).logprobs is None
    assert choose(LOGITS, row(num_logprobs=0)).logprobs == TokenLogprobs(pytest.approx(float(expected[1])))


def test_banned_tokens_are_never_drawn_even_if_top_k_reaches_them() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0])
    assert set(np.flatnonzero(frequencies(logits, 200, top_k=3))) == {1, 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 1, 36])
def test_logits_that_are_no_numbers_are_refused(bad: float, temperature: float, place: int) -> None:
    logits = torch.arange(37.0)
    logits[place] = bad
    with pytest.raises(NonFiniteValue):
        choose(logits, row(temperature=temperature))
    with pytest.raises(NonFiniteValue):
        choose(torch.full((3,), -math.inf), row(temperature=temperature))


# --- masks ------------------------------------------------------------------------------------------------------------


def bits(mask: Sequence[bool]) -> np.ndarray:
    """As int32 words, the lowest bit first."""
    words = [0] * -(-len(mask) // 32)
    for token, allowed in enumerate(mask):
        words[token // 32] |= int(allowed) << token % 32
    return np.array(words, dtype=np.uint32).view(np.int32)


def masked(mask: np.ndarray, output: tuple[int, ...] = (), **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), 10, (), output, mask)


def test_a_mask_comes_before_everything() -> None:
    mask = np.array([True, False, True, False, True, True])
    assert choose(LOGITS, masked(mask, temperature=0.0)).token_id == 2
    assert choose(LOGITS, masked(mask, temperature=0.0, logit_bias={1: 100.0})).token_id == 2
    assert choose(LOGITS, masked(mask, temperature=0.0, logit_bias={4: 9.0})).token_id == 4
    drawn = {choose(LOGITS, masked(mask, temperature=5.0, seed=seed, top_k=3)).token_id for seed in range(200)}
    assert drawn == {0, 2, 5}


def test_log_probabilities_do_not_know_of_the_mask() -> None:
    mask = np.array([False, False, False, False, True, False])
    chosen = choose(LOGITS, masked(mask, num_logprobs=1))
    expected = pytest.approx(float(torch.log_softmax(LOGITS.double(), dim=0)[4]))
    assert (chosen.token_id, chosen.logprobs) == (4, TokenLogprobs(expected, (1,), ANY))


@given(st.lists(st.booleans(), min_size=1, max_size=100).filter(any), st.integers(0, 99))
def test_a_bit_mask_is_the_same_as_a_boolean_one(mask: list[bool], seed: int) -> None:
    logits = torch.randn(len(mask), generator=torch.Generator().manual_seed(seed))
    assert choose(logits, masked(np.array(mask), seed=seed)) == choose(logits, masked(bits(mask), seed=seed))


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([-math.inf, -1.0, 0.0, 2.0, 2.5])), min_size=1, max_size=60))
def test_the_likeliest_allowed_token_is_taken_the_lowest_of_equal_ones(tokens: list[tuple[bool, float]]) -> None:
    allowed = [(-value, token) for token, (may, value) in enumerate(tokens) if may and value > -math.inf]
    logits, under = (
        torch.tensor([value for _, value in tokens]),
        masked(np.array([may for may, _ in tokens]), temperature=0),
    )
    if allowed:
        assert choose(logits, under).token_id == min(allowed)[1]
    else:
        with pytest.raises(NonFiniteValue):
            choose(logits, under)


@given(
    st.lists(st.booleans(), min_size=2, max_size=300).filter(any),
    st.integers(0, 999),
    st.sampled_from([{}, {"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.2}, {"temperature": 0.01}]),
)
def test_a_mask_is_the_same_as_a_ban_of_every_other_token(mask: list[bool], seed: int, params: dict[str, Any]) -> None:
    logits = 3 * torch.randn(len(mask), generator=torch.Generator().manual_seed(seed))
    banned = logits.masked_fill(~torch.tensor(mask), -math.inf)
    alone = SamplingRow(SamplingParams(**params, seed=seed), 10, (), ())
    assert choose(logits, masked(np.array(mask), **params, seed=seed)).token_id == choose(banned, alone).token_id


@pytest.mark.parametrize("mask", [np.ones(5, bool), np.ones(7, bool), np.ones(6), np.ones(2, np.int32)])
def test_a_mask_of_another_size_or_type_is_refused(mask: np.ndarray) -> None:
    with pytest.raises(BadInput) as raised:
        choose(LOGITS, masked(mask))
    assert raised.value.field == "allowed"


def test_a_mask_that_allows_nothing_is_refused() -> None:
    with pytest.raises(NonFiniteValue):
        choose(LOGITS, masked(np.zeros(6, bool), temperature=0.0))


def test_a_mask_that_leaves_only_an_end_goes_before_min_tokens() -> None:
    held = {"temperature": 0.0, "min_tokens": 5, "end_token_ids": (3,)}
    only_end = np.arange(6) == 3
    assert choose(LOGITS, masked(only_end, **held)).token_id == 3
    assert choose(LOGITS, masked(only_end | (np.arange(6) == 4), **held)).token_id == 4


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
