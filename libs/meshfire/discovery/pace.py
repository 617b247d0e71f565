"""When to ask an agent again: how often at most, and how long to wait after trouble. Pure; knows no clock, no agent.

Both follow Consul's advice for blocking queries: a token bucket instead of a fixed sleep, so that a quiet service is
watched without delay and a churning one degrades into polling; and growing, jittered waits, so that a mesh does not
return to a restarted agent in one wave.
"""

from __future__ import annotations

import random


class TokenBucket:
    """At most `burst` calls at once and `per_s` calls a second in the long run. Times are of one monotonic clock."""

    def __init__(self, per_s: float, burst: int, now_s: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._tokens = float(burst)
        self._at_s = now_s

    def take(self, now_s: float) -> float:
        """Take one token; how many seconds to wait before acting on it (0 if one was there)."""
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        self._tokens -= 1
        return max(0.0, -self._tokens / self._per_s)


class Backoff:
    """Doubling waits from `first_s` to `most_s`, each between half and the whole of its step."""

    def __init__(self, first_s: float, most_s: float, chance: random.Random | None = None) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._step_s = first_s
        self._chance = chance or random.Random()  # jitter, not secrecy

    def failed(self) -> float:
        """Seconds to wait after one more failure."""
        step_s = self._step_s
        self._step_s = min(self._most_s, step_s * 2)
        return step_s * self._chance.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        self._step_s = self._first_s
