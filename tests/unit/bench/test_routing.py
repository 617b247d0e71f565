"""The account behind `bench routing`, on requests whose hits can be counted by hand, and on the real trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.routing import ENDLESS, TRACES, Request, Setting, read_trace, replay


def request(at_s: float, *blocks: int, session: str = "") -> Request:
    return Request(at_s, 512 * len(blocks), tuple(bytes([one]) * 16 for one in blocks), session)


ONE = Setting(replicas=1, max_blocks=ENDLESS, utilisation=0.5, lag_s=0.0, round_robin=True)


def test_hits_are_leading_blocks_that_are_there() -> None:
    asked = [request(0, 1, 2, 3), request(10, 1, 2, 4), request(20, 9, 2, 3), request(30, 1, 2, 3, 5)]
    assert replay(asked, ONE).hit_rate == pytest.approx((0 + 2 + 0 + 3) / 13)


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    asked = [request(0, 1, 2, 3), request(10, 7), request(20, 1, 2, 3)]
    assert replay(asked, replace(ONE, max_blocks=3)).hit_rate == pytest.approx(2 / 7)


def test_placement_finds_the_prefix_that_round_robin_misses() -> None:
    asked = [request(10 * number, 1, 2, 3, 4, 10 + number) for number in range(9)]
    two = Setting(replicas=2, max_blocks=ENDLESS, utilisation=0.1, lag_s=0.0)
    assert replay(asked, two).hit_rate == pytest.approx(8 * 4 / 45)
    assert replay(asked, replace(two, round_robin=True)).hit_rate == pytest.approx(7 * 4 / 45)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not here")
def test_on_a_real_trace_placement_beats_round_robin_and_one_endless_cache_bounds_both() -> None:
    asked = read_trace(TRACES / "conversation_trace.jsonl.gz", 2500)
    eight = Setting(replicas=8, max_blocks=ENDLESS, utilisation=0.7, lag_s=0.05)
    ours, turn = replay(asked, eight).hit_rate, replay(asked, replace(eight, round_robin=True)).hit_rate
    ceiling = replay(asked, ONE).hit_rate
    assert turn < replay(asked, replace(eight, num_routers=3)).hit_rate <= ceiling
    assert turn < ours <= ceiling
    assert ours < replay(asked, replace(eight, sessions=True)).hit_rate <= ceiling


@pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not here")
def test_the_ceiling_is_the_published_one() -> None:
    whole = read_trace(TRACES / "synthetic_trace.jsonl.gz", None)
    assert replay(whole, ONE).hit_rate == pytest.approx(0.640, abs=0.001)
