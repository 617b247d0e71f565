"""Requests of the classic family, as sent. Owns types, ranges and defaults; translates nothing.

Ranges are those of the published schemas where they are narrower than the router's. What the older models lack but the
router has (stop, min_p, logit_bias …) is taken too: nobody is refused for asking.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.openai.marks import Ignored, NotYet
from services.gateway.openai.schema import Bias, Content, Key, Options, Stop, TokenIdText
from services.gateway.openai.strict import Strict
from services.gateway.openai.structured import SchemaOrText
from services.gateway.openai.tools import MAX_TOOLS, Function, Tool, ToolCall

MAX_TOKENS = 256
TEMPERATURE = 0.6
INT32_MAX = 2**31 - 1


class FlatTool(Function):
    """A tool without OpenAI's wrapping."""


class ClassicFormat(Strict):
    """JSON mode."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Any = None


class ClassicMessage(Strict):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Key | None = None
    tool_call_id: Key | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ClassicRequest(Strict):
    """POST ai/run/{model}"""

    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[ClassicMessage], Field(min_length=1, fail_fast=True)] | None = None
    raw: bool | None = None
    stream: bool | None = None
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    top_p: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=1, le=50)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=1, le=9999999999)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stop: Stop | None = None
    logit_bias: dict[TokenIdText, Bias] | None = None
    response_format: ClassicFormat | None = None
    guided_json: SchemaOrText | None = None
    tools: Annotated[list[Tool | FlatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None
    options: Options | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[Any, Ignored("the older models do not reason")] = None
    model: Annotated[Any, Ignored("the path names the model")] = None
    functions: Annotated[Any, NotYet([])] = None
    lora: Annotated[Any, NotYet()] = None
    image: Annotated[Any, NotYet()] = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one_prompt", "either prompt or messages is required", {"param": "prompt"})
        return self
