"""How long a lease will wait and how long it will take, from what was measured.

Owns the estimate behind `Retry-After`, early refusals and the predicted wait of traces. A wait is found by playing the
queue through: running leases end after what they are expected to need still, and those before in the queue take the
next slot that becomes free. Knows no clock and no workers; seconds of any one clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

#: what one more measurement takes off the weight of all before
_FADING = 0.97
#: a lease that ran longer than expected is expected to need this share of its time again
_OVERTIME = 0.2


class ServiceTime:
    """Seconds of a lease by its tokens: a straight line through what was seen, newest weighing most."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._weight > 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """One lease was done."""
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        more = (1.0, num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds)
        self._weight, self._x, self._y, self._xx, self._xy = (
            _FADING * old + new for old, new in zip(sums, more, strict=True)
        )

    def expected(self, num_tokens: int) -> float:
        """Of a lease; 0 while nothing is known."""
        if not self.known:
            return 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        # Without a spread, or with a slope that falls, tokens tell nothing.
        slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread) if spread > 1e-9 * mean_x**2 else 0.0
        return max(mean_y + slope * (num_tokens - mean_x), 0.1 * mean_y)

    def left(self, num_tokens: int, elapsed_s: float) -> float:
        """Of a lease that has run for `elapsed_s`."""
        return max(self.expected(num_tokens) - elapsed_s, _OVERTIME * elapsed_s)


def wait_s(
    service: ServiceTime, *, num_free: int, running: Iterable[tuple[int, float]], before: Iterable[int]
) -> float:
    """Until a newcomer has a slot. `running`: tokens and elapsed seconds of leases; `before`: tokens of those that are
    placed first. Infinite if there is no slot at all."""
    free_at = [0.0] * max(0, num_free) + [service.left(tokens, elapsed_s) for tokens, elapsed_s in running]
    if not free_at:
        return float("inf")
    heapq.heapify(free_at)
    for num_tokens in before:
        heapq.heapreplace(free_at, free_at[0] + service.expected(num_tokens))
    return free_at[0]
