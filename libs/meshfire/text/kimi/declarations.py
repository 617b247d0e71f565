"""Tools as the TypeScript namespace that Kimi K2.5 was trained to read.

Owns the order and the comments of a declaration; how a schema becomes a type is `schema_types`'s. A tool whose schema
has no TypeScript form raises, and the template falls back to JSON for all of them, as the release does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshfire.errors import InvalidPrompt
from meshfire.text.kimi.schema_types import TypeWriter, comment_lines

_MAX_DEPTH = 128


def declare_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The body of the tool declaration turn; empty if no tool is a function. Raises UnsupportedSchema."""
    functions = [sorted_keys(one["function"]) for one in tools if one.get("type") == "function"]
    if not functions:
        return ""
    declared = "\n".join(_declare(one) for one in functions)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{declared}\n}}\n"


def sorted_keys(value: Any, depth: int = 0) -> Any:
    """The same JSON value with the keys of every object in order. Raises InvalidPrompt for endless nesting."""
    if depth > _MAX_DEPTH:
        raise InvalidPrompt(f"a tool is nested deeper than {_MAX_DEPTH}", field="tools")
    if isinstance(value, Mapping):
        return {key: sorted_keys(value[key], depth + 1) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [sorted_keys(one, depth + 1) for one in value]
    return value


def _declare(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    writer = TypeWriter(parameters)
    written = writer.write(parameters)
    lines = [*writer.interfaces(), *comment_lines(function.get("description"))]
    return "\n".join([*lines, f"type {function['name']} = (_: {written}) => any;"])
