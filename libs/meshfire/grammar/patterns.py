r"""Regular expressions as JSON Schema means them: ECMA-262, where `\d` and `\w` are ASCII.

The engine's are Unicode's, and would let an Arabic digit pass where the reader's validator does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshfire.grammar.schema_keywords import LISTED, NAMED, ONE

_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_"}


def ascii_classes(pattern: str) -> str:
    r"""`\d`, `\w`, `\D` and `\W` written out; the negated ones inside a class stay as they are."""
    return "".join(_steps(pattern))


def with_ascii_classes(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with every pattern in it so written; values that are data are not touched."""
    return {key: _part(key, value) for key, value in schema.items()}


def _part(key: str, value: Any) -> Any:
    if key == "pattern" and isinstance(value, str):
        return ascii_classes(value)
    if key in NAMED and isinstance(value, Mapping):
        is_pattern = key == "patternProperties"
        return {ascii_classes(name) if is_pattern else name: _schema(one) for name, one in value.items()}
    if key in LISTED and isinstance(value, list):
        return [_schema(one) for one in value]
    return _schema(value) if key in ONE else value


def _schema(value: Any) -> Any:
    return with_ascii_classes(value) if isinstance(value, Mapping) else value


def _steps(pattern: str) -> Iterator[str]:
    in_class, characters = False, iter(pattern)
    for one in characters:
        if one != "\\":
            in_class = one == "[" or (in_class and one != "]")
            yield one
            continue
        escaped = next(characters, "")
        inner = _CLASSES.get(escaped.lower(), "")
        if escaped in _CLASSES:
            yield inner if in_class else f"[{inner}]"
        elif inner and not in_class:
            yield f"[^{inner}]"
        else:
            yield one + escaped
