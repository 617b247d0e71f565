"""Product of bfloat16 rows and a bfloat16 weight, each row's sum in one order whatever the other rows.

cuBLAS chooses its kernel, hence its order of summation, by the number of rows; this one never does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfire.kernels.triton.tile import COLUMNS, INNER, ROWS, dot, interpreting, num_tiles


def matmul(rows: Tensor, weight: Tensor) -> Tensor:
    """[T, in] bfloat16 by [out, in] bfloat16, both contiguous → [T, out] float32."""
    num_rows, inner = rows.shape
    columns = weight.shape[0]
    output = torch.empty(num_rows, columns, dtype=torch.float32, device=rows.device)
    if num_rows:
        grid = (num_tiles(num_rows, ROWS), num_tiles(columns, COLUMNS))
        _matmul[grid](rows, weight, output, num_rows, columns, inner, ROWS, COLUMNS, INNER, interpreting())
    return output


@triton.jit
def _matmul(  # type: ignore[no-untyped-def]
    rows_ptr,
    weight_ptr,
    output_ptr,
    num_rows,
    num_columns,
    num_inner,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    total = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.float32)
    for start in range(0, num_inner, TILE_INNER):
        inner = start + tl.arange(0, TILE_INNER)
        inside = inner < num_inner
        left = tl.load(
            rows_ptr + row[:, None].to(tl.int64) * num_inner + inner[None, :],
            mask=(row < num_rows)[:, None] & inside[None, :],
            other=0.0,
        )
        right = tl.load(
            weight_ptr + column[:, None].to(tl.int64) * num_inner + inner[None, :],
            mask=(column < num_columns)[:, None] & inside[None, :],
            other=0.0,
        )
        total = dot(left, tl.trans(right), total, UPCAST)
    tl.store(
        output_ptr + row[:, None].to(tl.int64) * num_columns + column[None, :],
        total,
        mask=(row < num_rows)[:, None] & (column < num_columns)[None, :],
    )
