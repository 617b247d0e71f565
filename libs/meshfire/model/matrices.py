"""Matrices of a checkpoint in whatever format it stores them, whole or cut, reading nothing but the cut.

Owns the names of each format's parts and the arithmetic of cuts: plain floats (`.weight`), FP8 blocks (`.weight`,
`.weight_scale_inv`), packed INT4 (`.weight_packed`, `.weight_scale`, `.weight_shape`). The tensors at hand decide, not
the configuration, whose list of exceptions each tool spells differently. Knows nothing of what matrices are for.
"""

from __future__ import annotations

from meshfire.errors import CheckpointError
from meshfire.model.checkpoint import FLOATS, Checkpoint
from meshfire.model.stored import PlainWeight, StoredWeight
from meshfire.model.stored_fp8 import BLOCK_SIZE, Fp8Weight
from meshfire.model.stored_int4 import GROUP_SIZE, VALUES_PER_WORD, Int4Weight

_FP8 = "F8_E4M3"
_ALL = slice(None)


def read_matrix(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], rows: slice = _ALL, columns: slice = _ALL
) -> StoredWeight:
    """The matrix `name` (without `.weight`), of which the whole has `shape`, or the given part of it.

    Raises CheckpointError naming the tensor that is missing, of another shape or of another type.
    """
    if f"{name}.weight_packed" in checkpoint:
        return _read_int4(checkpoint, name, shape, rows, columns)
    weight = f"{name}.weight"
    if weight in checkpoint and checkpoint.dtype(weight) == _FP8:
        return _read_fp8(checkpoint, name, shape, rows, columns)
    return PlainWeight(checkpoint.read(weight, shape, (rows, columns)))


def _read_int4(checkpoint: Checkpoint, name: str, shape: tuple[int, int], rows: slice, columns: slice) -> Int4Weight:
    num_rows, num_columns = shape
    if num_columns % GROUP_SIZE:
        raise CheckpointError(
            f"tensor {name}.weight_packed has {num_columns} inputs, expected a multiple of {GROUP_SIZE}",
            field=f"{name}.weight_packed",
        )
    if f"{name}.weight_shape" in checkpoint:
        said = checkpoint.read(f"{name}.weight_shape", (2,), dtypes=("I32", "I64")).tolist()
        if said != [num_rows, num_columns]:
            raise CheckpointError(
                f"tensor {name}.weight_shape says {said}, expected {list(shape)}", field=f"{name}.weight_shape"
            )
    start, stop, _ = columns.indices(num_columns)
    groups = slice(start // GROUP_SIZE, -(-stop // GROUP_SIZE))
    words_per_group = GROUP_SIZE // VALUES_PER_WORD
    words = slice(groups.start * words_per_group, groups.stop * words_per_group)
    packed = checkpoint.read(
        f"{name}.weight_packed", (num_rows, num_columns // VALUES_PER_WORD), (rows, words), dtypes=("I32",)
    )
    scale = checkpoint.read(f"{name}.weight_scale", (num_rows, num_columns // GROUP_SIZE), (rows, groups))
    return Int4Weight(packed, scale, stop - start, start % GROUP_SIZE)


def _read_fp8(checkpoint: Checkpoint, name: str, shape: tuple[int, int], rows: slice, columns: slice) -> Fp8Weight:
    values = checkpoint.read(f"{name}.weight", shape, (rows, columns), dtypes=(_FP8,))
    (first_row, past_row, _), (first_column, past_column, _) = rows.indices(shape[0]), columns.indices(shape[1])
    blocks = (_blocks(first_row, past_row), _blocks(first_column, past_column))
    grid = (-(-shape[0] // BLOCK_SIZE), -(-shape[1] // BLOCK_SIZE))
    scale = checkpoint.read(f"{name}.weight_scale_inv", grid, blocks, dtypes=FLOATS)
    return Fp8Weight(values, scale, first_row % BLOCK_SIZE, first_column % BLOCK_SIZE)


def _blocks(start: int, stop: int) -> slice:
    return slice(start // BLOCK_SIZE, -(-stop // BLOCK_SIZE))
