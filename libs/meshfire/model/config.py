"""Reading JSON configuration with the field named in every complaint.

Owns typed access to `config.json` and `generation_config.json`. Knows no architecture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshfire.errors import CheckpointError


@dataclass(frozen=True)
class Fields:
    """One JSON object. A field that is missing or null takes the default; without one it is an error."""

    values: Mapping[str, Any]
    path: str = ""

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(name, value, "a whole number of at least 0")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.integer(name, default)
        if value < 1:
            raise self._wrong(name, value, "a whole number of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Any real number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A whole number or a list of them; () if missing."""
        value = self.values.get(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        return tuple(Fields({name: item}, self.path).integer(name) for item in items)

    def section(self, name: str) -> Fields | None:
        """A nested object, or None."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return Fields(value, self._full(name))

    def expect(self, name: str, *accepted: object) -> None:
        """Raise unless the field is missing, null, or one of `accepted`."""
        value = self.values.get(name)
        if value is not None and value not in accepted:
            raise self._wrong(name, value, " or ".join(repr(one) for one in accepted))

    def _get(self, name: str, default: object) -> object:
        value = self.values.get(name)
        return default if value is None else value

    def _full(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def _wrong(self, name: str, value: object, expected: str) -> CheckpointError:
        seen = "missing" if value is None else repr(value)
        return CheckpointError(f"{self._full(name)} is {seen}, expected {expected}", field=self._full(name))


def read_json(directory: Path, name: str) -> Fields:
    """The JSON object in a model directory's file. Raises CheckpointError if it is missing or broken."""
    path = directory / name
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing", field=name) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", field=name) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object", field=name)
    return Fields(values)


def read_optional_json(directory: Path, name: str) -> Fields:
    """As `read_json`, but a missing file reads as an empty object."""
    return read_json(directory, name) if (directory / name).exists() else Fields({})
