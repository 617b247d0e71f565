"""Where the model cache lies: `<root>/models/<name>/`. Knows no model and no source.

Names that start with a dot in `models/` belong to the store: `.lock-<name>`, `.partial-<name>~<suffix>` (work under
way, never visible as a model) and `.trash-<name>~<suffix>` (a replaced model on its way out).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from meshfire.errors import BadInput

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def checked_name(name: str) -> str:
    """The name, if it can be a folder of the cache. Raises BadInput(field="name")."""
    if not _NAME.fullmatch(name):
        raise BadInput(f"{name!r} is no model name: letters, digits, '.', '_' and '-', at most 96", field="name")
    return name


@dataclass(frozen=True)
class Cache:
    """Paths of one cache."""

    root: Path

    @property
    def models(self) -> Path:
        """The folder of all models."""
        return self.root / "models"

    def model(self, name: str) -> Path:
        """The folder of a finished model."""
        return self.models / checked_name(name)

    def lock_file(self, name: str) -> Path:
        """Held (flock) by the one process that changes the model."""
        return self.models / f".lock-{checked_name(name)}"

    def partial(self, name: str, *, resumable: bool) -> Path:
        """A folder to work in. A resumable one has a fixed name, so the next attempt finds what is done."""
        return self.models / f".partial-{checked_name(name)}~{'resume' if resumable else token_hex(8)}"

    def trash(self, name: str) -> Path:
        """Where a model goes before it is deleted."""
        return self.models / f".trash-{checked_name(name)}~{token_hex(8)}"

    def names(self) -> list[str]:
        """Names of the finished models, sorted."""
        if not self.models.is_dir():
            return []
        return sorted(path.name for path in self.models.iterdir() if path.is_dir() and _NAME.fullmatch(path.name))

    def sweep(self, name: str, *, keep: Path | None = None) -> None:
        """Delete what dead attempts at `name` left, but for `keep`. Only under its lock."""
        for path in self._leftovers(name):
            if path != keep:
                shutil.rmtree(path, ignore_errors=True)

    def has_leftovers(self, name: str) -> bool:
        """True = an attempt at `name` is under way or died."""
        return next(self._leftovers(name), None) is not None

    def _leftovers(self, name: str) -> Iterator[Path]:
        yield from self.models.glob(f".partial-{checked_name(name)}~*")
        yield from self.models.glob(f".trash-{checked_name(name)}~*")
