"""How fast a queue moves, for an honest Retry-After."""

from __future__ import annotations

_SHARE_OF_NEWEST = 0.2
_SHORTEST_S = 1.0
_LONGEST_S = 60.0


class Pace:
    """Mean time between two leases that left a queue, newest ones weighing most. Times in seconds of any one clock."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._mean_s: float | None = None

    def left(self, now_s: float) -> None:
        """One lease left the queue."""
        if self._last_s is not None:
            gap = now_s - self._last_s
            mean = gap if self._mean_s is None else self._mean_s
            self._mean_s = mean + _SHARE_OF_NEWEST * (gap - mean)
        self._last_s = now_s

    def wait_s(self, num_waiting: int) -> float:
        """Time until a queue of this length is empty, 1 to 60 s; 1 s while nothing is known."""
        return min(_LONGEST_S, max(_SHORTEST_S, num_waiting * (self._mean_s or 0.0)))
