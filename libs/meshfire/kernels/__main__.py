"""`python -m meshfire.kernels`: build the kernels now, not at a worker's first start, and say what came of it."""

from __future__ import annotations

import sys

from meshfire.kernels.native import kernels

sys.stdout.write(kernels().describe() + "\n")
