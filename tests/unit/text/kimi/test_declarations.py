"""Tool declarations: one line of the mapping's table at a time."""

from __future__ import annotations

from typing import Any

import pytest

from meshfire.text.kimi.chat import kimi_chat
from meshfire.text.kimi.declarations import declare_tools
from meshfire.text.kimi.schema_types import TypeWriter, UnsupportedSchema


def written(schema: Any) -> str:
    return TypeWriter(schema if isinstance(schema, dict) else {}).write(schema)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, "string"),
        ({"type": "integer"}, "number"),
        ({"type": "boolean"}, "boolean"),
        ({"type": "null"}, "null"),
        ({"enum": ["a", None, True, 1]}, '"a" | None | True | 1'),
        ({"type": ["string", "object", "array", "integer", "null"]}, "string | {} | Array<any> | number | null"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "number"}}]}, "string | Array<number>"),
        ({"type": "array"}, "Array<any>"),
        ({}, "any"),
        (True, "any"),
        (False, "null"),
        ({"type": "object"}, "{}"),
        ({"type": "object", "properties": {}, "additionalProperties": True}, "{\n  [k: string]: any\n}"),
        ({"type": "object", "additionalProperties": False}, "{\n  [k: string]: never\n}"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "{\n  [k: string]: number\n}"),
    ],
)
def test_types(schema: Any, text: str) -> None:
    assert written(schema) == text


def test_fields_are_ordered_and_commented() -> None:
    schema = {
        "type": "object",
        "properties": {
            "b": {"type": "integer", "minimum": 1, "maximum": 9, "default": 3},
            "a": {"type": "boolean", "default": False},
            "z": {"type": "string", "description": "two\n\nlines", "pattern": "x", "minLength": 2},
            "list": {"type": "array", "minItems": 1, "items": {"type": "string", "description": "one of them"}},
            "deep": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
        "required": ["z", "deep"],
    }
    assert written(schema) == (
        "{\n"
        "  deep: {\n    x: string\n  },\n"
        "  // two\n\n  // lines\n  // minLength: 2, pattern: x\n  z: string,\n"
        "  // Default: False\n  a?: boolean,\n"
        "  // maximum: 9, minimum: 1\n  // Default: 3\n  b?: number,\n"
        "  // minItems: 1\n  list?: Array<\n    // one of them\n    string\n  >\n"
        "}"
    )


def test_references_become_interfaces() -> None:
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Point"}, "next": {"$ref": "#"}},
        "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    }
    tool = {"type": "function", "function": {"name": "go", "description": "Go.", "parameters": parameters}}
    assert declare_tools([tool]) == (
        "# Tools\n\n## functions\nnamespace functions {\n"
        "interface parameters {\n  at?: Point,\n  next?: parameters\n}\n"
        "interface Point {\n  x: number\n}\n"
        "// Go.\ntype go = (_: {\n  at?: Point,\n  next?: parameters\n}) => any;\n}\n"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}]},
        {"allOf": []},
        {"const": 1},
        {"description": "typeless"},
        {"$ref": "http://elsewhere"},
        {"$ref": "#/$defs/Missing"},
    ],
)
def test_what_has_no_type_makes_the_whole_declaration_json(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSchema):
        written(schema)
    parameters = {"type": "object", "properties": {"p": schema}}
    tools = [{"type": "function", "function": {"parameters": parameters, "name": "f"}}]
    options = kimi_chat([{"role": "user", "content": "x"}], tools, thinking=True).options
    assert "tools_ts_str" not in options
    assert list(options["tools"][0]["function"]) == ["name", "parameters"], "keys are sorted"


def test_only_functions_are_declared() -> None:
    assert declare_tools([{"type": "web_search"}]) == ""
    two = [{"type": "function", "function": {"name": name}} for name in "ab"]
    assert declare_tools(two) == (
        "# Tools\n\n## functions\nnamespace functions {\ntype a = (_: {}) => any;\ntype b = (_: {}) => any;\n}\n"
    )


def test_a_schema_that_nests_without_end_is_refused_not_followed() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(2000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UnsupportedSchema):
        written(schema)
