"""Noise that is a function of (seed, position, token): no state, so any process can go on where another stopped.

Owns the generator and its keying. Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) as
numpy implements it; numpy promises that a bit generator's stream never changes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_WORD = 2**64 - 1
_FRACTION_BITS = 52  # with the half added, the largest value is still below 1 in float64


def gumbel(seed: int, position: int, num_tokens: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise of token `ids` [N] (below `num_tokens`) at one position: [N], finite."""
    words = np.random.Philox(key=np.array([seed & _WORD, position & _WORD], dtype=np.uint64)).random_raw(num_tokens)
    uniform = ((words[ids] >> np.uint64(64 - _FRACTION_BITS)) + 0.5) * 2.0**-_FRACTION_BITS
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise
