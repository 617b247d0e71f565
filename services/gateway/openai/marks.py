"""Marks on schema fields: parameters that are accepted without effect, and ones that are refused by name.

A mark is an annotation, so the schema itself is the list of what is ignored and what is not supported yet;
docs/compatibility.md is held to it by a test. JSON null always counts as "not given".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

NOT_SUPPORTED = "not_supported_yet"


@dataclass(frozen=True)
class Ignored:
    """Accepted, and the result is the same without it."""

    why: str


# Compared by identity: `Annotated` keeps equal marks as one, and NotYet(1) would be taken for NotYet(True).
@dataclass(frozen=True, init=False, eq=False)
class NotYet:
    """Refused with its name, because the result would not be what was asked for. `harmless` values ask for nothing."""

    harmless: tuple[Any, ...]

    def __init__(self, *harmless: Any) -> None:
        object.__setattr__(self, "harmless", harmless)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        # `is` beside `==`: 0 == False, but a number is not the harmless value of a switch.
        if value is None or any(type(value) is type(one) and value == one for one in self.harmless):
            return value
        raise PydanticCustomError(NOT_SUPPORTED, "this parameter is not supported yet")


def marked(model: type[BaseModel], mark: type[Ignored] | type[NotYet]) -> Iterator[tuple[str, Any]]:
    """Names of a schema's fields that carry a mark, with the mark."""
    for name, info in model.model_fields.items():
        for one in info.metadata:
            if isinstance(one, mark):
                yield name, one
