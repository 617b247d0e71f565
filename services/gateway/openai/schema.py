"""Requests of the OpenAI dialect, as sent. Owns types, ranges and which parameters exist; translates nothing.

Strict: "5" is no number and 5.0 no count. A parameter is either used, marked `Ignored`, marked `NotYet`, or unknown,
which is an error too: a misspelt `temperatur` must not be silently dropped. JSON null means "not given" everywhere.
Ranges are those of the router's contract (`SamplingParams`), which are wider than OpenAI's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.openai.marks import Ignored, NotYet
from services.gateway.openai.strict import Strict
from services.gateway.openai.structured import Choices, ResponseFormat, SchemaOrText, StructuredOutputs, ToolChoice
from services.gateway.openai.tools import MAX_TOOLS, Thinking, Tool, ToolCall

MAX_STOPS = 16
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_KEY_CHARS = 1024
MAX_MODEL_CHARS = 256
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

_OTHER_PARTS = ("image_url", "input_audio", "file", "video_url", "refusal")
_OTHER_ROLES = ("function",)
_RECORD = "kept for the caller's own records there; nothing is recorded here"

Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
#: JSON has no other keys than strings.
TokenIdText = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
StopText = Annotated[str, Field(min_length=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Key = Annotated[str, Field(max_length=MAX_KEY_CHARS)]


# The tags of a union are steps of an error's location; "<" marks them as no part of the body.


def _text_or_list(value: Any) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


def _kind_of_prompt(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return "<texts>" if isinstance(value, list) else "<text>"
    if isinstance(value[0], list):
        return "<token_id_lists>"
    return "<texts>" if isinstance(value[0], str) else "<token_ids>"


class TextPart(Strict):
    """A piece of a message. Image, audio and file parts are refused before this."""

    type: Literal["text"]
    text: str
    cache_control: Annotated[Any, Ignored("prompt caching is always on")] = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") in _OTHER_PARTS:
            message = "parts of type {type} are not supported yet"
            raise PydanticCustomError("unsupported_part", message, {"type": value["type"]})
        return value


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("<list>")],
    Discriminator(_text_or_list),
]
Stop = Annotated[
    Annotated[StopText, Tag("<text>")] | Annotated[list[StopText], Field(max_length=MAX_STOPS), Tag("<list>")],
    Discriminator(_text_or_list),
]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<token_ids>")]
    | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True), Tag("<token_id_lists>")],
    Discriminator(_kind_of_prompt),
]


class Message(Strict):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Key | None = None

    refusal: Annotated[Any, Ignored("part of an earlier answer; templates have no place for it")] = None
    annotations: Annotated[Any, Ignored("part of an earlier answer; templates have no place for it")] = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Key | None = None
    function_call: Annotated[Any, NotYet()] = None
    audio: Annotated[Any, NotYet()] = None

    @model_validator(mode="before")
    @classmethod
    def _known_role(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("role") in _OTHER_ROLES:
            message = "messages of role {role} are not supported yet"
            raise PydanticCustomError("unsupported_role", message, {"role": value["role"]})
        return value

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "content is required for role {role}", {"role": self.role})
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "only an assistant makes tool calls", {"param": "tool_calls"})
        return self


class StreamOptions(Strict):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, Ignored("padding against traffic analysis; events carry none")] = None
    continuous_usage_stats: Annotated[Any, NotYet(False)] = None


class Options(Strict):
    """How a request is served, not what it asks for (Workers AI)."""

    rejectIfBusy: bool | None = None


class Request(Strict):
    """What both endpoints have in common."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: dict[TokenIdText, Bias] | None = None
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    prompt_cache_key: Key | None = None
    cache_salt: Key | None = None
    response_format: ResponseFormat | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    options: Options | None = None

    user: Annotated[Any, Ignored(_RECORD)] = None
    metadata: Annotated[Any, Ignored(_RECORD)] = None
    store: Annotated[Any, Ignored(_RECORD)] = None
    safety_identifier: Annotated[Any, Ignored(_RECORD)] = None
    prompt_cache_retention: Annotated[Any, Ignored("the prefix cache keeps what fits")] = None
    prompt_cache_options: Annotated[Any, Ignored("the prefix cache keeps what fits")] = None
    service_tier: Annotated[Any, NotYet("auto", "default")] = None
    prompt_logprobs: Annotated[Any, NotYet()] = None
    use_beam_search: Annotated[Any, NotYet(False)] = None
    length_penalty: Annotated[Any, NotYet(1, 1.0)] = None
    include_stop_str_in_output: Annotated[Any, NotYet(False)] = None
    lora: Annotated[Any, NotYet()] = None

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "stream_options", "stream_options needs stream: true", {"param": "stream_options"}
            )
        return self


class ChatRequest(Request):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    thinking: Thinking | None = None

    prediction: Annotated[Any, Ignored("a hint for speed")] = None
    functions: Annotated[Any, NotYet([])] = None
    function_call: Annotated[Any, NotYet("none", "auto")] = None
    modalities: Annotated[Any, NotYet(["text"])] = None
    audio: Annotated[Any, NotYet()] = None
    web_search_options: Annotated[Any, NotYet()] = None
    reasoning_effort: Annotated[Any, NotYet()] = None
    verbosity: Annotated[Any, NotYet()] = None
    moderation: Annotated[Any, NotYet()] = None
    best_of: Annotated[Any, NotYet(1)] = None
    echo: Annotated[Any, NotYet(False)] = None
    continue_final_message: Annotated[Any, NotYet(False)] = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs: true", {"param": "top_logprobs"})
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            message = "max_tokens and max_completion_tokens differ; give one of them"
            raise PydanticCustomError("max_tokens", message, {"param": "max_completion_tokens"})
        names = [tool.function.name for tool in self.tools or ()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PydanticCustomError("tools", "two tools are named {name}", {"param": "tools", "name": twice[0]})
        return self


class CompletionRequest(Request):
    """POST /v1/completions"""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    suffix: Annotated[Any, NotYet("")] = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise PydanticCustomError("best_of", "best_of must be at least n", {"param": "best_of"})
        if self.stream and self.best_of not in (None, self.n or 1):
            raise PydanticCustomError("best_of", "best_of above n cannot be streamed", {"param": "best_of"})
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "max_tokens 0 needs echo: true", {"param": "max_tokens"})
        return self
