"""What all kernels share: the tile of a matrix product, and a dot that Triton's interpreter can do as well.

The tile is one constant whatever the number of rows: another tile would sum in another order, and a token would get
other bits in another batch (design §5). 64 rows are the least that Hopper's wide instructions take; a decode step of
few rows is bound by reading weights, so the spare rows cost nothing that matters.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

ROWS = 64
COLUMNS = 64
INNER = 64


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, which has no bfloat16 arithmetic."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def dot(left, right, total, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """total + left · right with float32 sums. Products of bfloat16 are exact in float32 either way."""
    if UPCAST:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    return tl.dot(left, right, total)


@triton.jit
def to_bfloat16(values, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round float32 to the nearest bfloat16, ties to even, as hardware does; the interpreter's cast truncates."""
    if UPCAST:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    return values.to(tl.bfloat16)


def num_tiles(count: int, tile: int) -> int:
    """Tiles that cover `count`."""
    return -(-count // tile)
