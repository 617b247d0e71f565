"""The noise: a function of (seed, position, token) that is written down, whatever is asked for together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfire.model import noise
from meshfire.model.noise import gumbel, words_of


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


def words(seed: int, position: int, ids: list[int]) -> list[int]:
    return words_of([(seed, position)], [np.array(ids, dtype=np.int64)])[0].tolist()


SEEDS = st.integers(-(2**63), 2**64 - 1)
TOKENS = st.lists(st.integers(0, 5000), unique=True, max_size=40).map(sorted)


@given(st.lists(st.tuples(SEEDS, st.integers(0, 2**40), TOKENS), min_size=1, max_size=4), st.sampled_from([0, 10**9]))
def test_words_are_those_of_the_published_algorithm(asked: list[tuple[int, int, list[int]]], limit: int) -> None:
    """Both ways of making them, at once for several sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "_WORTH_ARITHMETIC", limit)
        made = words_of(
            [(seed, position) for seed, position, _ in asked], [np.array(ids, dtype=np.int64) for *_, ids in asked]
        )
    for (seed, position, ids), own in zip(asked, made, strict=True):
        key = (seed % 2**64, position)
        assert own.tolist() == [philox4x64(token // 4 + 1, key)[token % 4] for token in ids]


def test_truncation_does_not_move_the_noise_of_the_tokens_it_keeps() -> None:
    everything = words(5, 9, list(range(1000)))
    assert words(5, 9, [3, 70, 999]) == [everything[token] for token in (3, 70, 999)]


def test_noise_differs_by_seed_and_by_position() -> None:
    first = words(1, 2, [0, 1, 2, 3])
    assert not set(first) & set(words(2, 1, [0, 1, 2, 3]))
    assert not set(first) & set(words(1, 3, [0, 1, 2, 3]))
    assert not set(words(-1, 0, [0, 1])) & set(words(1, 0, [0, 1]))


def test_words_become_standard_gumbel_noise() -> None:
    some = np.array(words(1, 2, [0, 1, 2, 3]), dtype=np.uint64)
    assert gumbel(some) == pytest.approx([-math.log(-math.log((int(word) >> 12) / 2**52)) for word in some])
    extremes = gumbel(np.array([0, 2**64 - 1], dtype=np.uint64))
    assert np.isfinite(extremes).all()
    assert extremes[0] < -3.5
    assert extremes[1] > 36
