"""Where Meshfire keeps what it can make again: models and compiled kernels. Knows neither."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """$MESHFIRE_CACHE_DIR, else ~/.cache/meshfire."""
    chosen = (os.environ if environ is None else environ).get("MESHFIRE_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "meshfire"
