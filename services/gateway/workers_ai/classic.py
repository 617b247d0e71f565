"""The classic family: a prompt or messages in, `{"response": …}` out. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.dialect import Call, Json
from services.gateway.errors import HttpError
from services.gateway.openai import objects
from services.gateway.openai.base import as_request
from services.gateway.openai.schema import ChatRequest, CompletionRequest
from services.gateway.openai.translate import chat_calls, completion_calls
from services.gateway.outputs import Output, Piece, ToolCall
from services.gateway.workers_ai.classic_schema import MAX_TOKENS, TEMPERATURE, ClassicRequest, FlatTool

#: Members that OpenAI's dialect calls the same.
_SAME = (
    "stream",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "stop",
    "logit_bias",
    "guided_json",
    "options",
)


@dataclass(frozen=True)
class ClassicJob:
    """A valid request."""

    model: str
    request: ClassicRequest
    calls: Sequence[Call]

    @property
    def stream(self) -> bool:
        return bool(self.request.stream)

    @property
    def wants_json(self) -> bool:
        """The response is then an object, not its text."""
        form = self.request.response_format
        return self.request.guided_json is not None or (form is not None and form.type != "text")

    def renderer(self, request_id: str, created: int) -> ClassicRenderer:
        return ClassicRenderer(wants_json=self.wants_json)


def parse(model: str, body: object) -> ClassicJob:
    """A request for a model. Raises HttpError naming the field."""
    request = as_request(ClassicRequest, body)
    if request.prompt is not None and request.raw:  # any other prompt is one user's turn
        return ClassicJob(model, request, completion_calls(as_request(CompletionRequest, _completion(model, request))))
    return ClassicJob(model, request, chat_calls(as_request(ChatRequest, _chat(model, request))))


def _common(model: str, request: ClassicRequest) -> Json:
    given = request.model_dump(exclude_none=True)
    common = {name: given[name] for name in _SAME if name in given}
    common |= {
        "model": model,
        "max_tokens": request.max_tokens or MAX_TOKENS,
        "temperature": TEMPERATURE if request.temperature is None else request.temperature,
    }
    if request.top_p is not None:
        common["top_p"] = min(1.0, request.top_p)  # the published range goes to 2; nothing is above 1
    return common


def _completion(model: str, request: ClassicRequest) -> Json:
    if request.tools:
        raise HttpError(400, "tools need messages: a raw prompt is not rendered", "tools", "invalid_value")
    return _common(model, request) | {"prompt": request.prompt}


def _chat(model: str, request: ClassicRequest) -> Json:
    given = request.model_dump(exclude_none=True)
    messages = given.get("messages") or [{"role": "user", "content": request.prompt}]
    body = _common(model, request) | {"messages": messages}
    for name in ("response_format", "tool_choice", "chat_template_kwargs"):
        if name in given:
            body[name] = given[name]
    if request.tools:
        body["tools"] = [
            {"type": "function", "function": tool} if isinstance(parsed, FlatTool) else tool
            for tool, parsed in zip(given["tools"], request.tools, strict=True)
        ]
    return body


class ClassicRenderer:
    """Writes native results and frames. A frame with text comes per piece, calls come whole at the end."""

    def __init__(self, *, wants_json: bool) -> None:
        self._wants_json = wants_json

    def chunks(self, output: Output, piece: Piece) -> list[Json]:
        if piece.finished and output.calls:
            return [{"response": "", "tool_calls": [_call(one) for one in output.calls], "finish_reason": "tool_calls"}]
        return [{"response": piece.text, "tool_calls": []}] if piece.text else []

    def closing(self, outputs: Sequence[Output]) -> list[Json]:
        return [{"response": "", "usage": objects.usage(outputs)}]

    def whole(self, outputs: Sequence[Output]) -> Json:
        (output,) = outputs
        text = "".join(output.text)
        response: Any = json.loads(text) if self._wants_json and _is_json(text) else text
        calls = [_call(one) for one in output.calls]
        return {
            "response": None if calls and not text else response,
            "tool_calls": calls,
            "usage": objects.usage(outputs),
            "finish_reason": objects.finish_reason(output),
        }


def _call(call: ToolCall) -> Json:
    """Flat, with an object: the older models' form."""
    arguments = json.loads(call.arguments) if _is_json(call.arguments) else call.arguments
    return {"id": call.call_id, "name": call.name, "arguments": arguments}


def _is_json(text: str) -> bool:
    """An output cut by its length may end amid a value."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
