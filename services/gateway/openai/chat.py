"""POST /v1/chat/completions: the endpoint's dialect. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.dialect import Call, Json
from services.gateway.openai import objects
from services.gateway.openai.base import OpenAiDialect, as_request
from services.gateway.openai.schema import ChatRequest
from services.gateway.openai.translate import chat_calls, check_outputs
from services.gateway.outputs import Output, Piece


class ChatDialect(OpenAiDialect):
    """`max_outputs` bounds n."""

    def __init__(self, max_outputs: int) -> None:
        self._max_outputs = max_outputs

    def parse(self, body: object) -> ChatJob:
        request = as_request(ChatRequest, body)
        calls = chat_calls(request)
        check_outputs(calls, self._max_outputs)
        return ChatJob(request, calls)


@dataclass(frozen=True)
class ChatJob:
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


class ChatRenderer:
    """Writes `chat.completion` and `chat.completion.chunk` objects."""

    def __init__(self, request: ChatRequest, answer_id: str, created: int) -> None:
        self._head: Json = {"id": answer_id, "created": created, "model": request.model}
        options = request.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._with_logprobs = bool(request.logprobs)
        self._with_ids = bool(request.return_token_ids)

    def chunks(self, output: Output, piece: Piece) -> list[Json]:
        if piece.started:
            return [self._chunk([self._opening(output)])]
        if piece.finished:
            return [self._chunk([self._choice(output, piece, {}) | {"stop_reason": objects.stop_reason(output)}])]
        if objects.says_something(piece, with_ids=self._with_ids, with_logprobs=self._with_logprobs):
            first, *others = objects.deltas(piece) or [{"content": ""}]
            # Token ids and log-probabilities belong to the piece as a whole: they go with its first part.
            rest = [self._chunk([self._choice(output, Piece(), delta)]) for delta in others]
            return [self._chunk([self._choice(output, piece, first)]), *rest]
        return []

    def closing(self, outputs: Sequence[Output]) -> list[Json]:
        return [self._chunk([]) | {"usage": objects.usage(outputs)}] if self._with_usage else []

    def whole(self, outputs: Sequence[Output]) -> Json:
        choices = [self._whole_choice(output) for output in outputs]
        return self._head | {"object": "chat.completion", "choices": choices, "usage": objects.usage(outputs)}

    def _chunk(self, choices: list[Json]) -> Json:
        usage: Json = {"usage": None} if self._with_usage else {}
        return self._head | {"object": "chat.completion.chunk", "choices": choices} | usage

    def _opening(self, output: Output) -> Json:
        choice = self._choice(output, Piece(), {"role": "assistant", "content": ""})
        return choice | {"prompt_token_ids": objects.prompt_token_ids(output)} if self._with_ids else choice

    def _choice(self, output: Output, piece: Piece, delta: Json) -> Json:
        logprobs = objects.chat_logprobs(piece.logprobs) if self._with_logprobs and piece.logprobs else None
        choice: Json = {
            "index": output.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": objects.finish_reason(output) if piece.finished else None,
        }
        return choice | {"token_ids": list(piece.token_ids)} if self._with_ids else choice

    def _whole_choice(self, output: Output) -> Json:
        choice: Json = {
            "index": output.index,
            "message": objects.message(output),
            "logprobs": objects.chat_logprobs(output.logprobs) if self._with_logprobs else None,
            "finish_reason": objects.finish_reason(output),
            "stop_reason": objects.stop_reason(output),
        }
        return choice | self._ids(output)

    def _ids(self, output: Output) -> Json:
        if not self._with_ids:
            return {}
        return {"prompt_token_ids": objects.prompt_token_ids(output), "token_ids": output.token_ids}
