"""Before anything imports torch: one thread per process. Thread pools that spin beside each other cost seconds here."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
