"""Noise that is a function of (seed, position, token): no state, so any process can go on where another stopped.

Owns the generator and its keying. Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) as
numpy implements it; numpy promises that a bit generator's stream never changes. Token t of (seed, position) gets word
t mod 4 of counter t div 4 + 1 under the key (seed, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]
Ids: TypeAlias = NDArray[np.int64]

_WORD = 2**64 - 1
_FRACTION_BITS = 52  # with the half added, the largest value is still below 1 in float64
#: numpy's generator makes a word about so many times faster than `_philox` here, but always all from the first one on
_STREAM_GAIN = 32
#: words that numpy makes in the time that `_philox` takes for its first one
_WORTH_ARITHMETIC = 2**17

_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)


def words_of(keys: Sequence[tuple[int, int]], ids: Sequence[Ids]) -> list[Words]:
    """Random words of the tokens `ids` [N] of each sequence, whose keys are (seed, position): uniform over 64 bits.

    The same whichever way they are made: few of a long stream by arithmetic, for all sequences at once; many by numpy's
    generator.
    """
    table = np.array([(seed & _WORD, position & _WORD) for seed, position in keys], dtype=np.uint64)
    lengths = [int(own.max()) + 1 if len(own) else 0 for own in ids]
    few = [row for row, own in enumerate(ids) if len(own) * _STREAM_GAIN < lengths[row]]
    if sum(lengths[row] for row in few) < _WORTH_ARITHMETIC:
        few = []
    words: list[Words] = [
        np.empty(0, dtype=np.uint64) if row in few else _stream(table[row], own, lengths[row])
        for row, own in enumerate(ids)
    ]
    if few:
        sizes = [len(ids[row]) for row in few]
        made = _philox(np.concatenate([ids[row] for row in few]), np.repeat(table[few], sizes, axis=0))
        for row, part in zip(few, np.split(made, np.cumsum(sizes)[:-1]), strict=True):
            words[row] = part
    return words


def gumbel(words: Words) -> NDArray[np.float64]:
    """Standard Gumbel noise of words: [N], finite, larger for larger words."""
    uniform = ((words >> np.uint64(64 - _FRACTION_BITS)) + 0.5) * 2.0**-_FRACTION_BITS
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def _stream(key: Words, ids: Ids, length: int) -> Words:
    words: Words = np.random.Philox(key=key).random_raw(length)
    return words if len(ids) == length else words[ids]  # `ids` are distinct and ascending


def _philox(ids: Ids, keys: Words) -> Words:
    """Word `ids[i]` of the stream of `keys[i]`: [N]."""
    first = (ids >> 2).astype(np.uint64) + np.uint64(1)  # numpy counts up before the first block
    second, third, fourth = (np.zeros_like(first) for _ in range(3))
    left, right = keys[:, 0].copy(), keys[:, 1].copy()
    for _ in range(_ROUNDS):
        low, high = _product(first, _MULTIPLIERS[0])
        low_other, high_other = _product(third, _MULTIPLIERS[1])
        first, second, third, fourth = high_other ^ second ^ left, low_other, high ^ fourth ^ right, low
        left += np.uint64(_KEY_STEPS[0])  # wraps
        right += np.uint64(_KEY_STEPS[1])
    return np.choose(ids & 3, (first, second, third, fourth))


def _product(words: Words, multiplier: int) -> tuple[Words, Words]:
    """Low and high half of the 128-bit products."""
    factor_low, factor_high = np.uint64(multiplier & 0xFFFFFFFF), np.uint64(multiplier >> 32)
    words_low, words_high = words & _LOW, words >> _HALF
    cross = words_low * factor_high
    middle = ((words_low * factor_low) >> _HALF) + (cross & _LOW) + words_high * factor_low  # at most 2**64 - 1
    high = words_high * factor_high + (cross >> _HALF) + (middle >> _HALF)
    return words * np.uint64(multiplier), high
