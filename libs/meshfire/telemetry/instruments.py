"""Histogram bounds that services share, so that dashboards can add their series up. A service's own instruments live
beside its code (`services/X/instruments.py`), made from a meter with names of `names.py`.

Sources: OpenTelemetry semantic conventions, generative AI metrics (TTFT, TPOT, request duration); seconds throughout.
"""

from __future__ import annotations

from typing import Final

TTFT_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TPOT_BOUNDS_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
REQUEST_BOUNDS_S: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
#: for what happens many times per token: hops, steps, chunks
STEP_BOUNDS_S: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
