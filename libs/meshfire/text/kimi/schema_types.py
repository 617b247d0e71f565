"""JSON Schema as TypeScript types, in the dialect of Kimi K2.5's tool declarations.

Owns the mapping of one schema. What has no place in the dialect (oneOf, allOf, const, a schema without a type, foreign
references) raises UnsupportedSchema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_INDENT = "  "
_DEFINITIONS = "#/$defs/"
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_IN_A_LIST = {"object": "{}", "array": "Array<any>", "integer": "number"}
#: what nests deeper is no schema that a person wrote
_MAX_DEPTH = 64


class UnsupportedSchema(ValueError):
    """A schema that the dialect cannot say."""


def comment_lines(text: object) -> list[str]:
    """A description as `//` lines; an empty line stays empty."""
    if not isinstance(text, str) or not text:
        return []
    return [f"// {line}" if line else "" for line in text.split("\n")]


class TypeWriter:
    """Writes the types of one function. Remembers which definitions were referred to."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._definitions: Mapping[str, Any] = root.get("$defs") or {}
        self._refers_to_root = False
        self._depth = 0

    def interfaces(self) -> list[str]:
        """Declarations of the root, if it was referred to, and of every definition."""
        named = {"parameters": {key: one for key, one in self._root.items() if key != "$defs"}}
        if not self._refers_to_root:
            named = {}
        return [f"interface {name} {self.write(one)}" for name, one in {**named, **self._definitions}.items()]

    def write(self, schema: Any, indent: str = "") -> str:
        """The type of a schema; its lines after the first begin with `indent`. Raises UnsupportedSchema."""
        if schema is True or schema == {}:
            return "any"
        if schema is False:
            return "null"
        if not isinstance(schema, Mapping) or schema.keys() & {"oneOf", "allOf", "const"}:
            raise UnsupportedSchema("no TypeScript form")
        if self._depth >= _MAX_DEPTH:
            raise UnsupportedSchema(f"nested deeper than {_MAX_DEPTH}")
        self._depth += 1
        try:
            return self._write(schema, indent)
        finally:
            self._depth -= 1

    def _write(self, schema: Mapping[str, Any], indent: str) -> str:
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self.write(one, indent) for one in schema["anyOf"])
        if "enum" in schema:
            return " | ".join(_literal(one) for one in schema["enum"])
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(_IN_A_LIST.get(one, str(one)) for one in kind)
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        if not isinstance(kind, str):
            raise UnsupportedSchema("no type, enum, anyOf or $ref")
        return "number" if kind == "integer" else kind

    def _reference(self, target: object) -> str:
        if target == "#":
            self._refers_to_root = True
            return "parameters"
        if isinstance(target, str) and target.startswith(_DEFINITIONS):
            name = target[len(_DEFINITIONS) :]
            if name in self._definitions:
                return name
        raise UnsupportedSchema(f"reference {target!r}")

    def _object(self, schema: Mapping[str, Any], indent: str) -> str:
        properties: Mapping[str, Any] = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        deeper = indent + _INDENT
        fields = [
            self._field(name if name in required else f"{name}?", properties[name], deeper)
            for name in sorted(properties, key=lambda name: (name not in required, name))
        ]
        extra = schema.get("additionalProperties")
        if extra is not None:
            value = "never" if extra is False else self.write(extra, deeper)
            fields.append(f"{deeper}[k: string]: {value}")
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"

    def _field(self, name: str, schema: Any, indent: str) -> str:
        lines = [indent + line if line else line for line in _comments(schema)]
        return "\n".join([*lines, f"{indent}{name}: {self.write(schema, indent)}"])

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        if "items" not in schema:
            return "Array<any>"
        items = schema["items"]
        comments = _comments(items)
        if not comments:
            return f"Array<{self.write(items, indent)}>"
        deeper = indent + _INDENT
        lines = [deeper + line if line else line for line in comments]
        return "\n".join(["Array<", *lines, deeper + self.write(items, deeper), f"{indent}>"])


def _comments(schema: Any) -> list[str]:
    """Description, constraints, default."""
    if not isinstance(schema, Mapping):
        return []
    lines = comment_lines(schema.get("description"))
    kind = schema.get("type")
    kept = _CONSTRAINTS.get(kind, ()) if isinstance(kind, str) else ()
    constraints = [f"{key}: {schema[key]}" for key in kept if key in schema]
    if constraints:
        lines.append("// " + ", ".join(constraints))
    if "default" in schema:
        lines.append(f"// Default: {_default(schema['default'])}")
    return lines


def _default(value: Any) -> str:
    return str(value) if isinstance(value, int | float) else json.dumps(value, ensure_ascii=False)


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
