"""Int8 products are exact integer sums: right, and the same bits for any rows, threads, instructions or language."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshfire.kernels import int8, int8_torch
from meshfire.kernels.int8_pack import Int8Matrix, pack, pack_gated
from meshfire.kernels.native import Kernels, kernels
from tests.unit.kernels.levels import LEVELS, compiled, kernels_of, noise, same_bits

pytestmark = compiled


@pytest.fixture(scope="module", params=LEVELS)
def native(request: pytest.FixtureRequest) -> Kernels:
    return kernels_of(request.param)


@pytest.fixture
def two_threads() -> Iterator[None]:
    kernels().set_threads(2)
    yield
    kernels().set_threads(1)


def plain_values(matrix: Int8Matrix) -> Tensor:
    """Int8 weights [N, C] as Python would read the panels, element by element."""
    out = torch.zeros(matrix.num_outputs, matrix.num_inputs, dtype=torch.int64)
    for n in range(matrix.num_outputs):
        for k in range(matrix.num_inputs):
            out[n, k] = matrix.panels[n // 32, k // 2, n % 32 // 16, n % 16, k % 2]
    return out


def test_a_product_is_the_integer_sum_times_two_scales(native: Kernels) -> None:
    weight, rows, bias = noise(37, 21), noise(5, 21, seed=1), noise(37, 1, seed=2)[:, 0]
    matrix = pack(kernels().library, weight)
    values, scales = int8_torch.quantize_rows(rows, matrix.input_limit)
    sums = values.long() @ plain_values(matrix).T
    expected = sums.float() * scales * matrix.scales[:37] + bias
    assert same_bits(int8.linear(native.library, matrix, bias)(rows), expected)
    torch.testing.assert_close(expected, rows @ weight.T + bias, rtol=0, atol=0.05 * float(expected.abs().max()))


def test_weights_are_within_half_a_step_and_inputs_within_half_a_step() -> None:
    weight, rows = noise(40, 64), noise(9, 64, seed=3)
    matrix = pack(kernels().library, weight)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((plain_values(matrix) * step - weight).abs() <= 0.5001 * step).all()
    values, scales = int8_torch.quantize_rows(rows, matrix.input_limit)
    assert ((values * scales - rows).abs() <= 0.5001 * scales).all()
    assert values.abs().amax(1).eq(matrix.input_limit).all()


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 64), st.integers(1, 300) | st.integers(1500, 1600), st.integers(1, 100), st.integers(0, 99))
def test_native_and_torch_have_the_same_bits(count: int, inputs: int, outputs: int, seed: int) -> None:
    native, rows = kernels(), noise(count, inputs, seed=seed)
    matrix = pack(kernels().library, noise(outputs, inputs, seed=seed + 1))
    bias = noise(outputs, 1, seed=seed + 2)[:, 0]
    assert same_bits(int8.linear(native.library, matrix, bias)(rows), int8.linear(None, matrix, bias)(rows))
    both = pack_gated(kernels().library, noise(outputs, inputs, seed=seed + 3), noise(outputs, inputs, seed=seed + 4))
    down = pack(kernels().library, noise(inputs, outputs, seed=seed + 5))
    inner = int8.gated(native.library, both)(rows)
    assert same_bits(inner, int8.gated(None, both)(rows))
    whole = int8.ffn(native.library, both, down)(rows)
    assert same_bits(whole, int8.ffn(None, both, down)(rows))
    assert same_bits(whole, int8.linear(native.library, down, None)(inner))


@pytest.mark.parametrize("inputs", [576, 577])
def test_a_row_is_the_same_among_any_others(native: Kernels, inputs: int) -> None:
    product = int8.linear(native.library, pack(kernels().library, noise(96, inputs)), None)
    neurons = int8.gated(native.library, pack_gated(kernels().library, noise(50, inputs), noise(50, inputs, seed=1)))
    rows = noise(230, inputs, seed=2)
    for function in (product, neurons):
        alone = torch.cat([function(row[None]) for row in rows])
        for count in (*range(1, 65), 96, 97, 230):
            assert same_bits(function(rows[:count]), alone[:count])
        order = torch.randperm(230, generator=torch.Generator().manual_seed(4))
        assert same_bits(function(rows[order]), alone[order])


@pytest.mark.usefixtures("two_threads")
def test_two_threads_and_one_have_the_same_bits() -> None:
    native, rows = kernels(), noise(70, 576)
    product = int8.linear(native.library, pack(kernels().library, noise(1000, 576, seed=1)), None)
    both = pack_gated(kernels().library, noise(700, 576, seed=2), noise(700, 576, seed=3))
    ffn = int8.ffn(native.library, both, pack(kernels().library, noise(576, 700, seed=4)))
    for function in (product, ffn):
        for count in (1, 8, 70):
            native.set_threads(2)
            on_two = [function(rows[:count]) for _ in range(20)]
            native.set_threads(1)
            on_one = function(rows[:count])
            assert all(same_bits(one, on_one) for one in on_two)


def test_the_largest_sums_do_not_overflow(native: Kernels) -> None:
    for inputs in (2, 576, 7168, 18432):
        matrix = pack(kernels().library, torch.ones(1, inputs))
        result = int8.linear(native.library, matrix, None)(torch.full((1, inputs), 3.0))
        torch.testing.assert_close(result, torch.full((1, 1), 3.0 * inputs), rtol=1e-5, atol=0)


def test_rows_of_zeros_specks_and_what_is_no_number(native: Kernels) -> None:
    rows = noise(6, 40)
    rows[0], rows[1], rows[2, 3], rows[3, 5] = 0.0, 1e-35, float("nan"), float("-inf")
    matrix = pack(kernels().library, noise(33, 40, seed=1))
    out = int8.linear(native.library, matrix, None)(rows)
    assert (out[:2] == 0).all()
    assert out[2:4].isnan().all()
    assert same_bits(out[4:], int8.linear(native.library, matrix, None)(rows[4:]))
    assert int8.linear(native.library, matrix, None)(rows[:0]).shape == (0, 33)


def test_a_matrix_with_a_row_of_zeros_is_packed() -> None:
    weight = noise(3, 8)
    weight[1] = 0
    out = int8.linear(kernels().library, pack(kernels().library, weight), None)(noise(2, 8, seed=1))
    assert (out[:, 1] == 0).all()
    assert out.isfinite().all()


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 80), st.integers(1, 130), st.integers(0, 99))
def test_packing_is_the_same_in_torch(native: Kernels, outputs: int, inputs: int, seed: int) -> None:
    first, second = noise(outputs, inputs, seed=seed), noise(outputs, inputs, seed=seed + 1)
    first[outputs // 2] = 0
    second[0, 0] = float("inf")
    pairs = (
        (pack(native.library, first), pack(None, first)),
        (pack_gated(native.library, first, second), pack_gated(None, first, second)),
        (pack(native.library, first.bfloat16()), pack(None, first.bfloat16())),
    )
    for native_one, plain in pairs:
        assert torch.equal(native_one.panels, plain.panels)
        assert same_bits(native_one.scales, plain.scales)
        assert (native_one.num_outputs, native_one.num_inputs) == (plain.num_outputs, plain.num_inputs)
