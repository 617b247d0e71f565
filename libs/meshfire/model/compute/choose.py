"""Which compute path a process uses: what `--compute` says, as an object.

Owns the list of paths and what `auto` means. Knows nothing of models.
"""

from __future__ import annotations

from typing import get_args

from meshfire.errors import BadInput
from meshfire.kernels.native import Kernels, kernels
from meshfire.model.compute.bf16 import Bf16Compute, RoundedFp32Compute
from meshfire.model.compute.fp32 import Fp32Compute
from meshfire.model.compute.int8 import Int8Compute
from meshfire.model.compute.interface import Compute
from meshfire.model.compute.names import ComputeName


def resolved(name: str = "auto") -> str:
    """What `name` means here: `auto` keeps the checkpoint's own precision. Raises BadInput for an unknown name."""
    if name not in get_args(ComputeName):
        raise BadInput(f"compute is {name!r}, expected one of {', '.join(get_args(ComputeName))}", field="compute")
    return "fp32" if name == "auto" else name


def choose(name: str = "auto", compiled: Kernels | None = None) -> Compute:
    """The path of that name, with these kernels or this process's own. Raises BadInput for an unknown name."""
    compiled = compiled or kernels()
    match resolved(name):
        case "int8":
            return Int8Compute(compiled)
        case "bf16":
            return Bf16Compute(compiled.library) if compiled.library else RoundedFp32Compute()
        case _:
            return Fp32Compute()
