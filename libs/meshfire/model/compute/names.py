"""Names of compute paths, for settings: importable without torch."""

from __future__ import annotations

from typing import Literal

#: auto = the checkpoint's own precision as the device does it best; int8, bf16 = how weights are kept
ComputeName = Literal["auto", "fp32", "int8", "bf16"]
