"""How a pull tells its caller where it is. Knows no terminal."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

#: (stage, done, total): bytes or items of the stage; total 0 = not known.
Progress: TypeAlias = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Reports nothing."""


def folder_bytes(directory: Path) -> int:
    """Bytes of all files below a folder that others write to."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue  # moved in between
    return total
