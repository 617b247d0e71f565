"""What an output must look like, as sent: response_format, guided_*, structured_outputs, tool_choice.

Owns types and which combinations make sense; whether a schema or grammar can be enforced is the tokenizer's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.openai.strict import Strict
from services.gateway.openai.tools import FunctionName

MAX_CHOICES = 1024

#: Keys of OpenAI's wrapped form; anything else is a schema by itself, as Workers AI takes it.
_WRAPPED = frozenset({"name", "description", "schema", "strict"})

Schema = dict[str, Any] | bool
SchemaOrText = Annotated[
    Annotated[dict[str, Any], Tag("<object>")] | Annotated[bool, Tag("<bool>")] | Annotated[str, Tag("<text>")],
    Discriminator(lambda value: {dict: "<object>", bool: "<bool>"}.get(type(value), "<text>")),
]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """JSON that fits a schema: wrapped in `{"name", "schema", "strict"}`, or the schema itself."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any]

    @property
    def is_wrapped(self) -> bool:
        """OpenAI's form."""
        return self.json_schema.keys() <= _WRAPPED

    @property
    def schema_value(self) -> Schema:
        """Without a schema, any JSON object."""
        found: Schema = self.json_schema.get("schema", {"type": "object"}) if self.is_wrapped else self.json_schema
        return found

    @model_validator(mode="after")
    def _well_formed(self) -> Self:
        if not self.json_schema:
            raise PydanticCustomError("empty_schema", "json_schema is empty")
        if self.is_wrapped and not isinstance(self.schema_value, dict | bool):
            raise PydanticCustomError("schema_type", "json_schema.schema must be an object")
        return self


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(
        lambda value: f"<{value.get('type')}>" if isinstance(value, Mapping) else "<text>",
        custom_error_type="response_format",
        custom_error_message="must be an object whose type is text, json_object or json_schema",
    ),
]


class StructuredOutputs(Strict):
    """vLLM's way to say the same: exactly one."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in given) != 1:
            message = "give exactly one of json, json_object, regex, choice and grammar"
            raise PydanticCustomError("structured_outputs", message)
        return self


class _Name(Strict):
    name: FunctionName


class FunctionChoice(Strict):
    """Exactly one call of this function."""

    type: Literal["function"]
    function: _Name


class AllowedTools(Strict):
    """Some of the declared tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, fail_fast=True)]


class AllowedToolsChoice(Strict):
    """Calls of some of the declared tools only."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[FunctionChoice, Tag("<function>")]
    | Annotated[AllowedToolsChoice, Tag("<allowed_tools>")],
    Discriminator(
        lambda value: f"<{value.get('type')}>" if isinstance(value, Mapping) else "<mode>",
        custom_error_type="tool_choice",
        custom_error_message="must be none, auto, required, a function or allowed_tools",
    ),
]
