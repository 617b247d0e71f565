"""Products with bfloat16 weights: one order of sums, so the same bits for any rows, threads and instructions."""

from __future__ import annotations

import pytest
import torch

from meshfire.kernels import bf16
from meshfire.kernels.native import Kernels, kernels
from meshfire.model.compute.choose import choose
from meshfire.model.stored import PlainWeight, StoredFfn
from tests.unit.kernels.levels import LEVELS, compiled, kernels_of, noise, same_bits

IN_TORCH = Kernels(None, "the test wants torch")


def products(native: Kernels, inputs: int, outputs: int) -> list[bf16.RowProduct]:
    assert native.library
    weight, bias = noise(outputs, inputs), noise(outputs, 1, seed=1)[:, 0]
    both = bf16.pack_gated(noise(outputs, inputs, seed=2), noise(outputs, inputs, seed=3))
    down = bf16.pack(noise(inputs, outputs, seed=4))
    return [
        bf16.linear(native.library, bf16.pack(weight), bias, outputs),
        bf16.gated(native.library, both, outputs),
        bf16.ffn(native.library, both, down, inputs),
    ]


@compiled
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 96), (577, 50), (1, 1), (40, 700)])
def test_a_row_is_the_same_among_any_others_on_any_threads_and_instructions(inputs: int, outputs: int) -> None:
    rows = noise(130, inputs, seed=5)
    expected = [torch.cat([one(row[None]) for row in rows]) for one in products(kernels(), inputs, outputs)]
    for level in LEVELS:
        native = kernels_of(level)
        for function, alone in zip(products(native, inputs, outputs), expected, strict=True):
            for threads, counts in ((1, (1, 2, 5, 12, 13, 64, 97, 130)), (2, (1, 64, 130))):
                native.set_threads(threads)
                assert all(same_bits(function(rows[:count]), alone[:count]) for count in counts)
            native.set_threads(1)
            order = torch.randperm(130, generator=torch.Generator().manual_seed(1))
            assert same_bits(function(rows[order]), alone[order])


@compiled
def test_sums_go_from_the_first_input_to_the_last() -> None:
    rows, weight = noise(3, 70), noise(33, 70, seed=1).bfloat16()
    library = kernels().library
    assert library
    total = torch.zeros(3, 33)
    for k in range(70):  # one fused step each: exact in float64, rounded once
        total = (rows[:, k, None].double() * weight[None, :, k].double() + total.double()).float()
    assert same_bits(bf16.linear(library, bf16.pack(weight), None, 33)(rows), total)


@pytest.mark.parametrize("compiled_kernels", [kernels(), IN_TORCH], ids=["native", "torch"])
def test_a_bfloat16_checkpoint_loses_nothing(compiled_kernels: Kernels) -> None:
    compute = choose("bf16", compiled_kernels)
    gate, up = noise(50, 40).bfloat16(), noise(50, 40, seed=1).bfloat16()
    down, rows = noise(40, 50, seed=2).bfloat16(), noise(9, 40, seed=3)
    inner = torch.nn.functional.silu(rows.double() @ gate.double().T) * (rows.double() @ up.double().T)
    expected = inner @ down.double().T
    ffn = compute.ffn(StoredFfn.of(gate, up, down))
    assert float((ffn(rows) - expected).norm() / expected.norm()) < 1e-5
    halves = compute.linear(PlainWeight(down))(compute.gated(PlainWeight(gate), PlainWeight(up))(rows))
    assert same_bits(halves, ffn(rows))


@compiled
def test_weights_take_two_bytes_each_and_no_rows_are_no_trouble() -> None:
    linear = choose("bf16").linear(PlainWeight(noise(64, 100)))
    assert linear.num_bytes == 64 * 100 * 2
    assert linear(noise(1, 100)[:0]).shape == (0, 64)
