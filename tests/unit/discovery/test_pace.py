"""How often an agent is asked, against a simulated clock."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from meshfire.discovery.pace import Backoff, TokenBucket


def test_the_burst_is_free_and_the_next_waits_for_a_token() -> None:
    bucket = TokenBucket(per_s=5, burst=2, now_s=0)
    assert [bucket.take(0), bucket.take(0), bucket.take(0)] == [0, 0, 0.2]


def test_a_quiet_time_fills_the_bucket_again_but_never_beyond_the_burst() -> None:
    bucket = TokenBucket(per_s=5, burst=2, now_s=0)
    for _ in range(2):
        bucket.take(0)
    assert [bucket.take(1000) for _ in range(3)] == [0, 0, 0.2]


@given(st.lists(st.floats(0, 2), min_size=1, max_size=60), st.floats(0.5, 20), st.integers(1, 5))
def test_no_window_ever_sees_more_calls_than_the_rate_allows(gaps: list[float], per_s: float, burst: int) -> None:
    bucket = TokenBucket(per_s, burst, now_s=0)
    now_s, calls = 0.0, []
    for gap in gaps:
        now_s += gap
        now_s += bucket.take(now_s)  # the caller waits, then calls
        calls.append(now_s)
    for first, start_s in enumerate(calls):
        for last in range(first, len(calls)):
            assert last - first + 1 <= burst + (calls[last] - start_s) * per_s + 1e-6


def test_waits_double_up_to_the_most_stay_within_their_jitter_and_start_over_after_success() -> None:
    backoff = Backoff(first_s=1, most_s=8, chance=random.Random(7))
    for step_s in (1, 2, 4, 8, 8, 8):
        assert step_s / 2 <= backoff.failed() <= step_s
    backoff.succeeded()
    assert backoff.failed() <= 1
