"""Quantized matrices as stored: against compressed-tensors and plain loops, whole and cut anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from meshfire.errors import CheckpointError
from meshfire.model.checkpoint import Checkpoint
from meshfire.model.matrices import read_matrix
from meshfire.model.stored import PlainWeight
from meshfire.model.stored_fp8 import Fp8Weight
from meshfire.model.stored_int4 import Int4Weight

INT4_SHAPE = (40, 160)
FP8_SHAPE = (300, 200)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("matrices")
    save_file({**int4_tensors("int4", INT4_SHAPE), **fp8_tensors("fp8", FP8_SHAPE)}, directory / "model.safetensors")
    return Checkpoint(directory)


def int4_tensors(name: str, shape: tuple[int, int]) -> dict[str, Tensor]:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    generator = torch.Generator().manual_seed(4)
    integers = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    return {
        f"{name}.weight_packed": pack_to_int32(integers, 4),
        f"{name}.weight_scale": torch.rand(shape[0], shape[1] // 32, generator=generator).to(torch.bfloat16),
        f"{name}.weight_shape": torch.tensor(shape, dtype=torch.int32),
    }


def fp8_tensors(name: str, shape: tuple[int, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(8)
    grid = tuple(-(-size // 128) for size in shape)
    return {
        f"{name}.weight": torch.randn(shape, generator=generator).to(torch.float8_e4m3fn),
        f"{name}.weight_scale_inv": torch.rand(grid, generator=generator),
    }


def unpacked_by_hand(tensors: dict[str, Tensor], shape: tuple[int, int]) -> Tensor:
    words, scales = tensors["int4.weight_packed"].tolist(), tensors["int4.weight_scale"].float()
    nibbles = [[(words[row][at // 8] >> 4 * (at % 8)) & 15 for at in range(shape[1])] for row in range(shape[0])]
    return (torch.tensor(nibbles) - 8) * scales.repeat_interleave(32, dim=1)


def e4m3_by_hand(code: int) -> float:
    sign, exponent, mantissa = (-1) ** (code >> 7), code >> 3 & 15, code & 7
    return sign * (2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8))


def test_int4_is_what_compressed_tensors_unpacks(checkpoint: Checkpoint) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    tensors = int4_tensors("int4", INT4_SHAPE)
    stored = read_matrix(checkpoint, "int4", INT4_SHAPE)
    assert isinstance(stored, Int4Weight)
    integers = unpack_from_int32(tensors["int4.weight_packed"], 4, torch.Size(INT4_SHAPE))
    assert torch.equal(stored.integers(), integers)
    assert stored.integers().dtype == torch.int8
    assert torch.equal(stored.scales(), tensors["int4.weight_scale"].float())
    assert torch.equal(stored.dequantized(), unpacked_by_hand(tensors, INT4_SHAPE))
    # compressed-tensors multiplies in bfloat16; ours is exact, so rounding it once gives that product
    product = integers.to(torch.bfloat16) * tensors["int4.weight_scale"].repeat_interleave(32, dim=1)
    assert torch.equal(stored.dequantized().to(torch.bfloat16), product)


def test_fp8_is_what_its_bits_say_times_its_block(checkpoint: Checkpoint) -> None:
    tensors = fp8_tensors("fp8", FP8_SHAPE)
    stored = read_matrix(checkpoint, "fp8", FP8_SHAPE)
    assert isinstance(stored, Fp8Weight)
    codes = tensors["fp8.weight"].view(torch.uint8)
    values = torch.tensor([e4m3_by_hand(code) for code in codes.flatten().tolist()]).view(FP8_SHAPE)
    for row in range(0, FP8_SHAPE[0], 7):
        for column in range(0, FP8_SHAPE[1], 5):
            scale = tensors["fp8.weight_scale_inv"][row // 128, column // 128]
            assert stored.dequantized()[row, column] == values[row, column] * scale


@given(data=st.data(), name=st.sampled_from(["int4", "fp8"]))
@settings(max_examples=60, deadline=None)
def test_a_cut_has_the_values_of_the_whole(checkpoint: Checkpoint, data: st.DataObject, name: str) -> None:
    shape = INT4_SHAPE if name == "int4" else FP8_SHAPE
    rows, columns = (data.draw(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted)) for n in shape)
    cut = (slice(*rows), slice(*columns))
    part = read_matrix(checkpoint, name, shape, *cut)
    expected = read_matrix(checkpoint, name, shape).dequantized()[cut]
    assert part.shape == tuple(expected.shape)
    assert torch.equal(part.dequantized(), expected)


def test_a_cut_of_packed_columns_reads_only_the_groups_it_touches(checkpoint: Checkpoint) -> None:
    part = read_matrix(checkpoint, "int4", INT4_SHAPE, slice(4, 6), slice(64, 96))
    assert isinstance(part, Int4Weight)
    assert (part.packed.shape, part.scale.shape, part.skipped) == ((2, 4), (2, 1), 0)
    part = read_matrix(checkpoint, "int4", INT4_SHAPE, columns=slice(70, 100))
    assert isinstance(part, Int4Weight)
    assert (part.packed.shape, part.scale.shape, part.skipped) == ((40, 8), (40, 2), 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_floats_stay_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(6, 4).to(dtype)
    save_file({"plain.weight": values}, tmp_path / "model.safetensors")
    stored = read_matrix(Checkpoint(tmp_path), "plain", (6, 4), columns=slice(1, 3))
    assert isinstance(stored, PlainWeight)
    assert stored.values.dtype == dtype
    assert torch.equal(stored.dequantized(), values[:, 1:3].float())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"int4.weight_scale": None}, "int4.weight_scale"),
        ({"int4.weight_scale": torch.ones(40, 4)}, "int4.weight_scale"),
        ({"int4.weight_scale": torch.ones(40, 5, dtype=torch.int32)}, "int4.weight_scale"),
        ({"int4.weight_packed": torch.zeros(40, 19, dtype=torch.int32)}, "int4.weight_packed"),
        ({"int4.weight_packed": torch.zeros(40, 20)}, "int4.weight_packed"),
        ({"int4.weight_shape": torch.tensor([40, 128])}, "int4.weight_shape"),
        ({"int4.weight_shape": torch.tensor([160, 40])}, "int4.weight_shape"),
        ({"fp8.weight_scale_inv": None}, "fp8.weight_scale_inv"),
        ({"fp8.weight_scale_inv": torch.ones(3, 1)}, "fp8.weight_scale_inv"),
        ({"fp8.weight": torch.zeros(300, 200, dtype=torch.float8_e5m2)}, "fp8.weight"),
    ],
)
def test_a_part_that_does_not_fit_is_named(change: dict[str, Tensor | None], field: str, tmp_path: Path) -> None:
    tensors = {**int4_tensors("int4", INT4_SHAPE), **fp8_tensors("fp8", FP8_SHAPE), **change}
    save_file({name: one for name, one in tensors.items() if one is not None}, tmp_path / "model.safetensors")
    name = field.partition(".")[0]
    with pytest.raises(CheckpointError, match=field) as raised:
        read_matrix(Checkpoint(tmp_path), name, INT4_SHAPE if name == "int4" else FP8_SHAPE)
    assert raised.value.field == field


def test_inputs_that_are_no_whole_groups_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match="multiple of 32"):
        read_matrix(checkpoint, "int4", (40, 150))
