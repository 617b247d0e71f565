"""The chat family: OpenAI's chat completions on Workers AI's path, in its envelope. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.dialect import Call, Json
from services.gateway.errors import HttpError
from services.gateway.openai.base import as_request
from services.gateway.openai.chat import ChatRenderer
from services.gateway.openai.schema import ChatRequest
from services.gateway.openai.translate import chat_calls, check_outputs


@dataclass(frozen=True)
class NativeChatJob:
    """A valid request."""

    request: ChatRequest
    calls: Sequence[Call]

    @property
    def model(self) -> str:
        return self.request.model

    @property
    def stream(self) -> bool:
        return bool(self.request.stream)

    def renderer(self, request_id: str, created: int) -> ChatRenderer:
        return ChatRenderer(self.request, f"chatcmpl-{request_id}", created)


def parse(model: str, body: object, max_outputs: int) -> NativeChatJob:
    """A request for a model. Raises HttpError naming the field."""
    if not isinstance(body, dict):
        raise HttpError(400, "the body must be a JSON object", code="invalid_type")
    request = as_request(ChatRequest, _as_openai(model, body))
    calls = chat_calls(request)
    check_outputs(calls, max_outputs)
    return NativeChatJob(request, calls)


def _as_openai(model: str, body: dict[str, Any]) -> Json:
    """A prompt is one user's turn; a stream ends with its usage, though native clients never ask for it."""
    asked = {**body, "model": model}
    if "prompt" in asked:
        if "messages" in asked:
            raise HttpError(400, "either prompt or messages is required", "prompt", "invalid_value")
        asked["messages"] = [{"role": "user", "content": asked.pop("prompt")}]
    if asked.get("stream") is True:
        options = asked.get("stream_options")
        if options is None or isinstance(options, dict):
            asked["stream_options"] = {**(options or {}), "include_usage": True}
    return asked
