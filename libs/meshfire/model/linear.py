"""Matrix products in which a row's result does not depend on how many other rows there are.

Owns the choice of kernel. A token's arithmetic must be the same alone, in a batch and in any chunk of a prompt
(design §5); BLAS picks other summation orders for one row than for many. oneDNN with a reordered weight does not, and
reads the weight once however few the rows are. Where oneDNN is missing, rows are padded to a count from which BLAS
stays with one kernel. oneDNN too splits the inner dimension of a single row where it has AVX-512, hence the padding
there. Knows nothing of layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: below this many rows BLAS, and for one row oneDNN, switch to matrix-vector kernels with another summation order
_MIN_ROWS = 4


def pack(weight: Tensor) -> Tensor:
    """A float32 copy of `weight` [out, in] in the layout that `linear` reads fastest (opaque with oneDNN)."""
    weight = weight.to(torch.float32).contiguous()
    if not _has_onednn():
        return weight.clone()
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows` [T, in] by `weight` [out, in], packed or plain → [T, out] float32."""
    num_rows = rows.shape[0]
    if 0 < num_rows < _MIN_ROWS:
        rows = F.pad(rows, (0, 0, 0, _MIN_ROWS - num_rows))
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows.contiguous(), weight, bias, "none", [], "")
        return product[:num_rows]
    return F.linear(rows, weight, bias)[:num_rows]


def _has_onednn() -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")
