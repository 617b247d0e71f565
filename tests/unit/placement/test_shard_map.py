"""The placement document and the even spread, against brute force."""

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfire.errors import InvalidPlacement
from meshfire.model.interface import ExpertLayout
from meshfire.placement.shard_map import ExpertSpan, ShardMap, spans_of, spread

LAYOUT = ExpertLayout(num_experts=(0, 7, 7, 2), hidden_size=4)


def layouts() -> st.SearchStrategy[ExpertLayout]:
    return st.lists(st.integers(0, 12), min_size=1, max_size=6).map(lambda sizes: ExpertLayout(tuple(sizes), 4))


def placed(layout: ExpertLayout, num_shards: int, replicas: int = 1) -> ShardMap:
    ids = [f"expert-{index}" for index in range(num_shards)]
    return spread(layout, ids, epoch=3, model="tiny", revision="r1", replicas=replicas)


@given(layouts(), st.integers(1, 6), st.data())
def test_a_spread_covers_the_layout_with_as_many_distinct_copies_as_asked(layout, num_shards, data):
    replicas = data.draw(st.integers(1, num_shards))
    shard_map = placed(layout, num_shards, replicas)
    assert shard_map.covers(layout)
    for experts in shard_map.layers:
        assert all(len(set(one)) == len(one) == replicas for one in experts)


@given(layouts(), st.integers(1, 6))
def test_a_spread_is_even_within_each_layer_and_over_all_layers(layout, num_shards):
    shard_map = placed(layout, num_shards)
    per_layer = [Counter(one[0] for one in experts) for experts in shard_map.layers]
    ids = [f"expert-{index}" for index in range(num_shards)]
    for counts in [*per_layer, sum(per_layer, Counter())]:
        sizes = [counts[shard_id] for shard_id in ids]
        assert max(sizes) - min(sizes) <= 1


@given(layouts(), st.integers(1, 6))
def test_each_shard_holds_one_contiguous_run_per_layer(layout, num_shards):
    shard_map = placed(layout, num_shards)
    for shard_id in shard_map.shard_ids:
        spans = spans_of(shard_map.experts_of(shard_id))
        assert len({span.layer for span in spans}) == len(spans)


@given(layouts(), st.integers(1, 6), st.data())
def test_a_document_survives_its_json_form(layout, num_shards, data):
    shard_map = placed(layout, num_shards, data.draw(st.integers(1, num_shards)))
    assert ShardMap.from_json(shard_map.to_json()) == shard_map


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 20))))
def test_spans_hold_exactly_the_experts_they_were_made_of(experts):
    spans = spans_of(experts)
    assert sorted(expert for span in spans for expert in span.experts()) == sorted(experts)
    assert all(not (a.layer == b.layer and a.first + a.count == b.first) for a, b in itertools.pairwise(spans))


def test_the_document_has_the_form_that_operators_read():
    document = json.loads(placed(ExpertLayout((0, 2), 4), 2).to_json())
    assert document == {
        "epoch": 3,
        "model": "tiny",
        "model_revision": "r1",
        "layers": [[], [["expert-0"], ["expert-1"]]],
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"epoch": 0}, "epoch"),
        ({"epoch": True}, "epoch"),
        ({"epoch": "1"}, "epoch"),
        ({"model": ""}, "model"),
        ({"model_revision": None}, "model_revision"),
        ({"layers": {}}, "layers"),
        ({"layers": [[], "x"]}, "layers[1]"),
        ({"layers": [[], [[]]]}, "layers[1][0]"),
        ({"layers": [[], [["a", "a"]]]}, "layers[1][0]"),
        ({"layers": [[], [["a", 7]]]}, "layers[1][0][1]"),
    ],
)
def test_a_broken_document_is_refused_and_the_field_named(change, field):
    good = {"epoch": 1, "model": "tiny", "model_revision": "r1", "layers": [[], [["a"]]]}
    assert ShardMap.from_json(json.dumps(good).encode()).epoch == 1
    with pytest.raises(InvalidPlacement) as caught:
        ShardMap.from_json(json.dumps(good | change).encode())
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize("document", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'"text"'])
def test_what_is_no_json_object_is_refused(document):
    with pytest.raises(InvalidPlacement) as caught:
        ShardMap.from_json(document)
    assert caught.value.field == "document"


@pytest.mark.parametrize(("ids", "replicas"), [([], 1), (["a", "a"], 1), (["a"], 2), (["a"], 0)])
def test_a_spread_that_cannot_be_is_refused(ids, replicas):
    with pytest.raises(InvalidPlacement):
        spread(LAYOUT, ids, epoch=1, model="tiny", revision="r1", replicas=replicas)


def test_a_placement_of_another_layout_does_not_cover():
    assert not placed(LAYOUT, 2).covers(ExpertLayout((0, 7, 7, 3), 4))
    assert not placed(LAYOUT, 2).covers(ExpertLayout((0, 7, 7), 4))


def test_spans_are_ascending_runs():
    assert spans_of([(1, 5), (0, 2), (0, 1), (1, 3)]) == (ExpertSpan(0, 1, 2), ExpertSpan(1, 3, 1), ExpertSpan(1, 5, 1))
