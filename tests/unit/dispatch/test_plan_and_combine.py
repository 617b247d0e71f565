"""Cutting a step over shards and adding it up again equals never having cut it, for every placement."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfire.dispatch.combine import Partial, combine
from meshfire.dispatch.plan import ShardPlanner
from meshfire.errors import UnknownExpert
from meshfire.model.fixed_point import FIXED_LIMIT, FIXED_UNIT, MAX_TERMS, from_fixed
from meshfire.placement.shard_map import ShardMap

HIDDEN = 3


@st.composite
def steps(draw):
    """A random placement with replicas, some of its shards live, and a random choice of experts."""
    num_experts = draw(st.integers(1, 9))
    shard_ids = [f"expert-{index}" for index in range(draw(st.integers(1, 5)))]
    replicas = st.lists(st.sampled_from(shard_ids), min_size=1, unique=True).map(tuple)
    layer = tuple(draw(replicas) for _ in range(num_experts))
    num_tokens, top_k = draw(st.integers(0, 6)), draw(st.integers(1, 4))
    ids = st.lists(st.integers(-1, num_experts - 1), min_size=top_k, max_size=top_k)
    chosen = draw(st.lists(ids, min_size=num_tokens, max_size=num_tokens))
    topk_ids = torch.tensor(chosen, dtype=torch.int32).reshape(num_tokens, top_k)
    live = {shard_id: draw(st.integers(0, 9)) for shard_id in shard_ids if draw(st.booleans())}
    return ShardMap(1, "tiny", "r1", (layer,)), topk_ids, live


def output_of(row: int, column: int, expert: int) -> list[int]:
    """What an imaginary expert adds for one choice: any integers, the same wherever it is computed."""
    source = random.Random(f"{row}/{column}/{expert}")
    return [source.randint(-(2**44), 2**44) for _ in range(HIDDEN)]


def compute(part_ids: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """An imaginary shard: sums in Python's unbounded integers over the ids that it was given."""
    sums = [[0] * HIDDEN for _ in rows]
    for index, row in enumerate(rows):
        for column, expert in enumerate(part_ids[index].tolist()):
            if expert >= 0:
                sums[index] = [a + b for a, b in zip(sums[index], output_of(row, column, expert))]
    return torch.tensor(sums, dtype=torch.int64).reshape(len(rows), HIDDEN)


@given(steps(), st.randoms())
@settings(max_examples=200)
def test_the_combined_parts_equal_the_brute_force_sum_bit_for_bit(step, order):
    shard_map, topk_ids, live = step
    every_row = list(range(len(topk_ids)))
    partials = []
    for part in ShardPlanner(shard_map).plan(topk_ids, 0, live):
        rows = every_row if part.rows is None else part.rows.tolist()
        partials.append(Partial(part.rows, compute(part.topk_ids, rows)))
    order.shuffle(partials)
    expected = from_fixed(compute(topk_ids, every_row))
    assert torch.equal(combine(partials, len(topk_ids), HIDDEN), expected)


@given(steps())
def test_each_choice_goes_to_exactly_one_replica_and_no_row_travels_in_vain(step):
    shard_map, topk_ids, live = step
    seen = torch.full_like(topk_ids, -1)
    for part in ShardPlanner(shard_map).plan(topk_ids, 0, live):
        rows = torch.arange(len(topk_ids)) if part.rows is None else part.rows
        assert len(rows) == len(part.topk_ids)
        for row, ids in zip(rows.tolist(), part.topk_ids.tolist()):
            assert any(expert >= 0 for expert in ids)
            for column, expert in enumerate(ids):
                if expert >= 0:
                    assert part.shard_id in shard_map.layers[0][expert]
                    assert seen[row, column] == -1
                    seen[row, column] = expert
    assert torch.equal(seen, topk_ids)


@given(steps())
def test_an_away_shard_is_asked_only_for_experts_without_a_live_replica(step):
    shard_map, topk_ids, live = step
    for part in ShardPlanner(shard_map).plan(topk_ids, 0, live):
        if part.shard_id not in live:
            for expert in set(part.topk_ids.flatten().tolist()) - {-1}:
                assert not set(shard_map.layers[0][expert]) & set(live)


def test_a_hot_expert_goes_to_the_less_loaded_replica():
    shard_map = ShardMap(1, "tiny", "r1", ((("a", "b"), ("a",)),))
    topk_ids = torch.tensor([[0, 1]], dtype=torch.int32)
    assert {p.shard_id for p in ShardPlanner(shard_map).plan(topk_ids, 0, {"a": 5, "b": 0})} == {"a", "b"}
    assert {p.shard_id for p in ShardPlanner(shard_map).plan(topk_ids, 0, {"a": 0, "b": 5})} == {"a"}


def test_rows_without_an_expert_of_the_shard_stay_at_home():
    shard_map = ShardMap(1, "tiny", "r1", ((("a",), ("b",)),))
    topk_ids = torch.tensor([[0, -1], [1, 0], [1, -1]], dtype=torch.int32)
    first, second = ShardPlanner(shard_map).plan(topk_ids, 0, {"a": 0, "b": 0})
    assert (first.shard_id, first.rows.tolist(), first.topk_ids.tolist()) == ("a", [0, 1], [[0, -1], [-1, 0]])
    assert (second.shard_id, second.rows.tolist(), second.topk_ids.tolist()) == ("b", [1, 2], [[1, -1], [1, -1]])


@pytest.mark.parametrize(("layer", "expert"), [(0, 2), (0, -2), (1, 0), (-1, 0)])
def test_an_expert_that_no_shard_was_given_is_named(layer, expert):
    shard_map = ShardMap(1, "tiny", "r1", ((("a",), ("a",)),))
    with pytest.raises(UnknownExpert):
        ShardPlanner(shard_map).plan(torch.tensor([[expert]], dtype=torch.int32), layer, {"a": 0})


def test_the_largest_legal_sum_over_shards_is_exact():
    most = int(FIXED_LIMIT / FIXED_UNIT) - 1
    half = torch.full((1, HIDDEN), most * (MAX_TERMS // 2), dtype=torch.int64)
    assert torch.equal(combine([Partial(None, half), Partial(None, half)], 1, HIDDEN), from_fixed(2 * half))
    assert from_fixed(2 * half)[0, 0].item() == pytest.approx(MAX_TERMS * FIXED_LIMIT)


def test_partials_are_left_as_they_came():
    first, second = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])
    combine([Partial(None, first), Partial(None, second), Partial(torch.tensor([0]), second)], 1, HIDDEN)
    combine([Partial(None, first), Partial(torch.tensor([0]), second)], 1, HIDDEN)
    assert (first.tolist(), second.tolist()) == ([[1, 2, 3]], [[4, 5, 6]])
