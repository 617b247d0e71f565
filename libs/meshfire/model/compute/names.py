"""Names of compute paths, for settings: importable without torch."""

from __future__ import annotations

from typing import Literal

#: auto = the checkpoint's own precision as the device does it best; int8 = weights in 8 bits
ComputeName = Literal["auto", "fp32", "int8"]
