"""Gate, experts, fixed point and frequencies against direct formulas."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshfire.errors import InvalidTensor, NonFiniteValue, UnknownExpert
from meshfire.model.compute.fp32 import Fp32Compute
from meshfire.model.compute.interface import Ffn
from meshfire.model.config import Fields
from meshfire.model.experts import LocalExperts, weighted_sum
from meshfire.model.ffn_weights import slice_bounds
from meshfire.model.fixed_point import FIXED_LIMIT, FIXED_UNIT, from_fixed, to_fixed
from meshfire.model.gate import Gate
from meshfire.model.linear import pack
from meshfire.model.rope import rope_config
from meshfire.model.stored import StoredFfn

HIDDEN, INNER, NUM_EXPERTS = 12, 20, 6


def plain_experts(seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    drawn = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(NUM_EXPERTS)]
    return [(gate, up, down) for gate, up, down in drawn]


def plain_sum(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Token by token, choice by choice, in float64."""
    experts, total = plain_experts(), torch.zeros(hidden.shape, dtype=torch.float64)
    for token, column in np.ndindex(*ids.shape):
        if ids[token, column] >= 0:
            gate, up, down = (one.double() for one in experts[int(ids[token, column])])
            row = hidden[token].double()
            total[token] += weights[token, column].double() * (
                down @ (torch.nn.functional.silu(gate @ row) * (up @ row))
            )
    return total


class Source:
    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    def load(self, layer: int, expert: int) -> Ffn:
        self.read.append((layer, expert))
        return Fp32Compute().ffn(StoredFfn.of(*plain_experts()[expert]))


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_the_weighted_sum_is_exact_over_any_split_of_the_experts(data: st.DataObject) -> None:
    num_tokens, top_k = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    cells = st.lists(st.integers(-1, NUM_EXPERTS - 1), min_size=num_tokens * top_k, max_size=num_tokens * top_k)
    ids = torch.tensor(data.draw(cells), dtype=torch.int32).view(num_tokens, top_k)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    hidden, weights = torch.randn(num_tokens, HIDDEN, generator=generator), torch.rand(ids.shape, generator=generator)
    experts = {index: Fp32Compute().ffn(StoredFfn.of(*one)) for index, one in enumerate(plain_experts())}
    total = weighted_sum(hidden, ids, weights, experts)
    torch.testing.assert_close(from_fixed(total).double(), plain_sum(hidden, ids, weights), rtol=1e-4, atol=1e-4)
    left = torch.tensor(sorted(data.draw(st.sets(st.integers(0, NUM_EXPERTS - 1)))), dtype=torch.int32)
    mine = torch.isin(ids, left)
    parts = [weighted_sum(hidden, ids.masked_fill(~held, -1), weights, experts) for held in (mine, ~mine)]
    assert torch.equal(parts[0] + parts[1], total)
    assert torch.equal(weighted_sum(hidden[:1], ids[:1], weights[:1], experts), total[:1])


def test_local_experts_read_only_what_is_chosen_and_only_once() -> None:
    source = Source()
    experts = LocalExperts(source)
    ids = torch.tensor([[4, -1], [1, 4]], dtype=torch.int32)
    hidden, weights = torch.randn(2, HIDDEN), torch.rand(2, 2)
    for _ in range(2):
        output = experts.dispatch(3, hidden, ids, weights).result()
    assert source.read == [(3, 1), (3, 4)]
    torch.testing.assert_close(output.double(), plain_sum(hidden, ids, weights), rtol=1e-4, atol=1e-4)


def test_bad_choices_are_named() -> None:
    experts = {0: Fp32Compute().ffn(StoredFfn.of(*plain_experts()[0]))}
    with pytest.raises(UnknownExpert, match="expert 5"):
        weighted_sum(torch.zeros(1, HIDDEN), torch.tensor([[5]]), torch.ones(1, 1), experts)
    with pytest.raises(InvalidTensor, match="topk_ids"):
        weighted_sum(torch.zeros(1, HIDDEN), torch.zeros(1, 65, dtype=torch.int32), torch.ones(1, 65), experts)
    with pytest.raises(NonFiniteValue):
        weighted_sum(torch.full((1, HIDDEN), torch.nan), torch.tensor([[0]]), torch.ones(1, 1), experts)


@given(st.lists(st.floats(-FIXED_LIMIT + 1, FIXED_LIMIT - 1, width=32), min_size=1, max_size=64))
def test_fixed_point_sums_cannot_overflow_and_round_once_per_term(values: list[float]) -> None:
    fixed = to_fixed(torch.tensor(values, dtype=torch.float64))
    assert int(fixed.sum()) == sum(fixed.tolist())  # Python's integers cannot overflow
    exact = sum(map(Fraction, values))
    assert abs(int(fixed.sum()) * Fraction(FIXED_UNIT) - exact) <= Fraction(FIXED_UNIT) / 2 * len(values)
    torch.testing.assert_close(from_fixed(fixed), torch.tensor(values), rtol=0, atol=FIXED_UNIT)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, FIXED_LIMIT, -FIXED_LIMIT])
def test_what_fixed_point_cannot_hold_is_refused(value: float) -> None:
    with pytest.raises(NonFiniteValue) as raised:
        to_fixed(torch.tensor([0.0, value]), field="output")
    assert raised.value.field == "output"
    assert to_fixed(torch.empty(0)).shape == (0,)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 3)]), st.booleans(), st.integers(0, 99))
def test_the_gate_equals_a_loop_over_its_definition(groups: tuple[int, int], normalise: bool, seed: int) -> None:
    num_groups, topk_groups = groups
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(5, 8, generator=generator), torch.randn(16, 8, generator=generator)
    bias = torch.randn(16, generator=generator)
    gate = Gate(pack(weight), bias, 4, num_groups, topk_groups, normalise, 2.5)
    ids, weights = gate.choose(hidden)
    for token in range(5):
        scores = 1 / (1 + np.exp(-(weight.double() @ hidden[token].double()).numpy()))
        choice = scores + bias.double().numpy()
        size = 16 // num_groups
        rating = [np.sort(choice[one * size : (one + 1) * size])[-2:].sum() for one in range(num_groups)]
        kept = np.argsort(rating)[-topk_groups:]
        allowed = [expert for expert in range(16) if expert // size in kept]
        best = sorted(sorted(allowed, key=lambda expert: -choice[expert])[:4])
        assert ids[token].tolist() == best
        expected = scores[best] / (scores[best].sum() if normalise else 1) * 2.5
        assert weights[token].tolist() == pytest.approx(expected, rel=1e-5)


def test_yarn_of_k25_has_the_published_numbers() -> None:
    scaling = {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    config = rope_config(Fields({"rope_theta": 50000.0, "rope_scaling": scaling, "max_position_embeddings": 262144}))
    rope = config.build(64, interleaved=True)
    ratio = rope.inv_freq / 50000.0 ** (-torch.arange(0, 64, 2) / 64)
    assert ratio[[0, 8, 9, 14, 19, 20, 31]].tolist() == pytest.approx(
        [1, 1, 0.91797, 0.5078, 0.09766, 1 / 64, 1 / 64], rel=1e-3
    )
    assert rope.attention_factor == 1.0
    assert 192**-0.5 * config.softmax_factor == pytest.approx(0.14467963)


def test_rotation_turns_pairs_and_keeps_dot_products_of_equal_distance() -> None:
    config = rope_config(Fields({"max_position_embeddings": 64}))
    for interleaved in (False, True):
        rope = config.build(8, interleaved=interleaved)
        query, key = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

        def dot(at: int, to: int, rope=rope, query=query, key=key) -> float:  # type: ignore[no-untyped-def]
            turned = [rope.rotate(one, rope.angles(torch.tensor([where]))) for one, where in ((query, at), (key, to))]
            return float((turned[0] * turned[1]).sum())

        assert dot(5, 2) == pytest.approx(dot(40, 37), abs=1e-4)
        assert dot(0, 0) == pytest.approx(float((query * key).sum()), abs=1e-5)


@given(st.integers(1, 300), st.integers(1, 64))
def test_slices_cover_a_dense_ffn_evenly_and_once(size: int, num_slices: int) -> None:
    parts = [slice_bounds(size, num_slices, index) for index in range(num_slices)]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(size))
    lengths = [part.stop - part.start for part in parts]
    assert max(lengths) - min(lengths) <= 1
