"""Tools and messages of the chat endpoint's requests, as sent. Owns types and ranges; translates nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.openai.marks import Ignored
from services.gateway.openai.strict import Strict

MAX_TOOLS = 128

#: As OpenAI's; Kimi's ids hold the name between a dot and a colon.
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Strict):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """Functions are the only tools; others run on OpenAI's side."""

    type: Literal["function"]
    function: Function


class CalledFunction(Strict):
    """A function and its arguments, as JSON text."""

    name: FunctionName
    arguments: str = ""


class ToolCall(Strict):
    """A call that the assistant made in an earlier turn."""

    id: Annotated[str, Field(max_length=1024)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[Any, Ignored("its place in the list")] = None


class Thinking(Strict):
    """Moonshot's switch."""

    type: Literal["enabled", "disabled"]
