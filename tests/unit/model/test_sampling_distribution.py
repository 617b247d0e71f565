"""Whether tokens come as often as they should: chi-square against a plain reference, which a wrong sampler fails.

The reference follows the documented order of steps one token at a time, in Python floats, and shares no code with the
sampler. Seeds are fixed: a correct sampler passes every time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from meshfire.model import sampling
from meshfire.model.sampling import SamplingParams, SamplingRow, sample
from meshfire.model.sampling_counts import TokenCounts

VOCAB = 24
NUM_DRAWS = 1800
#: A sampler that is right falls below it once in 10,000 cases; with fixed seeds it either does or not.
P_VALUE = 1e-4
LOGITS = [2.0, 1.5, 1.5, -1.0, 0.25, 3.0, 0.0, -2.5, 1.0, 2.5, -0.5, 0.75, 1.25, -3.0, 2.25, 0.5] + [-0.25] * 8
PROMPT, OUTPUT = (5, 5, 3, 20), (9, 9, 9, 0, 14)
BANNED = 2

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 4.0},
    "cold": {"temperature": 0.4},
    "top_k": {"top_k": 7},
    "top_k within equals": {"top_k": 18},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "k, p and min": {"temperature": 0.7, "top_k": 9, "top_p": 0.93, "min_p": 0.08},
    "top_p of what top_k left": {"top_k": 4, "top_p": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.4},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": {13: 4.0, 5: -100.0, 7: 2.0}},
    "held back": {"min_tokens": 6, "end_token_ids": (5,), "stop_token_ids": (9, 1)},
    "all of it": {
        "temperature": 1.3,
        "top_k": 15,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.4,
        "logit_bias": {13: 5.0, 4: 1.5},
        "min_tokens": 9,
        "end_token_ids": (14,),
    },
}


def reference(params: SamplingParams, allowed: Sequence[bool]) -> list[float]:
    """The probability of each token."""
    values = [value if ok else -math.inf for value, ok in zip(LOGITS, allowed, strict=True)]
    counts = Counter(OUTPUT)
    for token in {*PROMPT, *OUTPUT}:
        rate = params.repetition_penalty
        values[token] = values[token] / rate if values[token] > 0 else values[token] * rate
    for token, count in counts.items():
        values[token] -= params.frequency_penalty * count
        values[token] -= params.presence_penalty
    for token, bias in params.logit_bias.items():
        values[token] += bias
    if len(OUTPUT) < params.min_tokens:
        for token in (*params.end_token_ids, *params.stop_token_ids):
            values[token] = -math.inf
    weights = [math.exp(value / params.temperature) for value in values]
    likeliest_first = sorted(range(VOCAB), key=lambda token: (-values[token], token))
    kept = likeliest_first[: params.top_k or VOCAB]
    total, reached, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        nucleus.append(token)
        reached += weights[token] / total
        if reached >= params.top_p:
            break
    least = params.min_p * max(weights)
    kept = [token for token in nucleus if weights[token] >= least]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(VOCAB)]


def draws(params: dict[str, Any], allowed: np.ndarray | None = None) -> np.ndarray:
    """How often each token was drawn: half of the draws over positions of one seed, half over seeds of one position."""
    half = NUM_DRAWS // 2
    keys = [(77, position) for position in range(half)] + [(seed, 5) for seed in range(1000, 1000 + half)]
    counts = TokenCounts(PROMPT, OUTPUT)
    rows = [SamplingRow(SamplingParams(seed=seed, **params), at, PROMPT, OUTPUT, allowed, counts) for seed, at in keys]
    tokens = [one.token_id for one in sample(torch.tensor(LOGITS).expand(NUM_DRAWS, -1), rows)]
    return np.bincount(tokens, minlength=VOCAB)


def p_value(counts: np.ndarray, expected: Sequence[float]) -> float:
    """Of Pearson's chi-square; 0 if something came that cannot. Rare tokens are counted as one."""
    wanted = np.array(expected) * counts.sum()
    if counts[wanted == 0].any():
        return 0.0
    rare = (wanted < 5) & (wanted > 0)
    groups = [(counts[i], wanted[i]) for i in np.flatnonzero(wanted >= 5)]
    if rare.any():
        groups.append((counts[rare].sum(), wanted[rare].sum()))
    chi_square = sum((seen - want) ** 2 / want for seen, want in groups)
    degrees = torch.tensor((len(groups) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(chi_square / 2, dtype=torch.float64)))


@pytest.mark.parametrize("name", CASES)
def test_tokens_come_as_often_as_the_reference_says(name: str) -> None:
    params = CASES[name]
    assert p_value(draws(params), reference(SamplingParams(**params), [True] * VOCAB)) > P_VALUE


def test_a_mask_leaves_the_other_tokens_their_shares() -> None:
    allowed = np.arange(VOCAB) % 3 != BANNED
    params = CASES["all of it"]
    assert p_value(draws(params, allowed), reference(SamplingParams(**params), allowed.tolist())) > P_VALUE


# --- a sampler that is wrong must fail, else the tests above prove nothing --------------------------------------------

WRONG_PARAMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 1.0}, {"temperature": 1.3}),
    ({"top_k": 7}, {"top_k": 8}),
    ({"top_p": 0.8}, {"top_p": 0.9}),
    ({"min_p": 0.15}, {"min_p": 0.25}),
    ({"presence_penalty": 1.5}, {"frequency_penalty": 1.5}),
    ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.2}),
    ({"logit_bias": {13: 4.0}}, {"logit_bias": {13: 5.0}}),
]


@pytest.mark.parametrize(("asked", "done"), WRONG_PARAMS)
def test_draws_of_slightly_other_parameters_are_told_apart(asked: dict[str, Any], done: dict[str, Any]) -> None:
    assert p_value(draws(done), reference(SamplingParams(**asked), [True] * VOCAB)) < P_VALUE


def _no_noise_at_the_top(gumbel: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda words: np.minimum(gumbel(words), 2.0)


def _uniform(gumbel: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda words: words / 2.0**64


def _too_wide(gumbel: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda words: 1.3 * gumbel(words)


@pytest.mark.parametrize("mutate", [_no_noise_at_the_top, _uniform, _too_wide])
def test_noise_of_another_distribution_is_told_apart(
    mutate: Callable[[Callable[[Any], Any]], Callable[[Any], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "gumbel", mutate(sampling.gumbel))
    assert p_value(draws({}), reference(SamplingParams(), [True] * VOCAB)) < P_VALUE


def test_steps_in_another_order_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-p over all tokens instead of over those that top-k left."""
    kept_tokens = sampling.kept_tokens

    def other_order(scaled: Any, params: SamplingParams) -> Any:
        of_all = kept_tokens(scaled, SamplingParams(top_p=params.top_p))
        return np.intersect1d(of_all, kept_tokens(scaled, SamplingParams(top_k=params.top_k)))

    monkeypatch.setattr(sampling, "kept_tokens", other_order)
    params = CASES["top_p of what top_k left"]
    assert p_value(draws(params), reference(SamplingParams(**params), [True] * VOCAB)) < P_VALUE
