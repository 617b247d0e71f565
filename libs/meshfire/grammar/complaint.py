"""Which part of a schema cannot be enforced: the path to it, for the person who wrote it.

Owns the search. A schema that the engine refuses is taken apart: into the subschema that is refused by itself, then
into the keyword without which that one would be accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshfire.grammar.schema_keywords import LISTED, NAMED, ONE

_SHARED = ("$defs", "definitions")
_MAX_DEPTH = 64

Refuses = Callable[[Mapping[str, Any]], str]


def locate(schema: Mapping[str, Any], refuses: Refuses) -> str:
    """Path of the smallest part that is refused, such as `properties.code.pattern`; "" for the whole.

    `refuses` says why a schema is refused, or "" if it is accepted.
    """
    shared = {key: schema[key] for key in _SHARED if key in schema}
    return ".".join(_locate(schema, shared, refuses, 0))


def _locate(schema: Mapping[str, Any], shared: Mapping[str, Any], refuses: Refuses, depth: int) -> list[str]:
    for path, part in _children(schema) if depth < _MAX_DEPTH else ():
        if refuses({**shared, **part}):
            return [*path, *_locate(part, shared, refuses, depth + 1)]
    for key in schema:
        if key not in ("type", *_SHARED):
            rest = {name: value for name, value in schema.items() if name != key}
            if not refuses({**shared, **rest}):
                return [key]
    return []


def _children(schema: Mapping[str, Any]) -> Iterator[tuple[list[str], Mapping[str, Any]]]:
    for key in NAMED:
        named = schema.get(key)
        if isinstance(named, Mapping):
            yield from (([key, str(name)], one) for name, one in named.items() if isinstance(one, Mapping))
    for key in LISTED:
        listed = schema.get(key)
        if isinstance(listed, list):
            yield from (([f"{key}[{index}]"], one) for index, one in enumerate(listed) if isinstance(one, Mapping))
    for key in ONE:
        one = schema.get(key)
        if isinstance(one, Mapping):
            yield [key], one
