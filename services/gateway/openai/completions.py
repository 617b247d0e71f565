"""POST /v1/completions: the endpoint's dialect. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.dialect import Call, Json
from services.gateway.openai import objects
from services.gateway.openai.base import OpenAiDialect, as_request
from services.gateway.openai.schema import CompletionRequest
from services.gateway.openai.translate import check_outputs, completion_calls, ranked
from services.gateway.outputs import Output, Piece


class CompletionDialect(OpenAiDialect):
    """`max_outputs` bounds prompts x best_of."""

    def __init__(self, max_outputs: int) -> None:
        self._max_outputs = max_outputs

    def parse(self, body: object) -> CompletionJob:
        request = as_request(CompletionRequest, body)
        calls = completion_calls(request)
        check_outputs(calls, self._max_outputs)
        return CompletionJob(request, calls)


@dataclass(frozen=True)
class CompletionJob:
    """A valid request."""

    request: CompletionRequest
    calls: Sequence[Call]

    @property
    def model(self) -> str:
        return self.request.model

    @property
    def stream(self) -> bool:
        return bool(self.request.stream)

    def renderer(self, request_id: str, created: int) -> CompletionRenderer:
        return CompletionRenderer(self.request, f"cmpl-{request_id}", created)


class CompletionRenderer:
    """Writes `text_completion` objects, whole or as chunks."""

    def __init__(self, request: CompletionRequest, answer_id: str, created: int) -> None:
        self._head: Json = {"id": answer_id, "object": "text_completion", "created": created, "model": request.model}
        options = request.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._with_logprobs = request.logprobs is not None
        self._with_ids = bool(request.return_token_ids)
        self._num_best = (request.n or 1) if ranked(request) else None
        self._offsets: dict[int, objects.TextOffsets] = defaultdict(objects.TextOffsets)

    def chunks(self, output: Output, piece: Piece) -> list[Json]:
        if piece.started:
            return self._opening(output)
        if piece.finished:
            return [self._chunk([self._choice(output, piece) | {"stop_reason": objects.stop_reason(output)}])]
        if objects.says_something(piece, with_ids=self._with_ids, with_logprobs=self._with_logprobs):
            return [self._chunk([self._choice(output, piece)])]
        return []

    def closing(self, outputs: Sequence[Output]) -> list[Json]:
        return [self._chunk([]) | {"usage": objects.usage(outputs)}] if self._with_usage else []

    def whole(self, outputs: Sequence[Output]) -> Json:
        kept = outputs if self._num_best is None else best_of(outputs, self._num_best)
        choices = [self._whole_choice(index, output) for index, output in enumerate(kept)]
        return self._head | {"choices": choices, "usage": objects.usage(outputs)}

    def _chunk(self, choices: list[Json]) -> Json:
        usage: Json = {"usage": None} if self._with_usage else {}
        return self._head | {"choices": choices} | usage

    def _opening(self, output: Output) -> list[Json]:
        """Only the prompt's ids need a chunk before the first text."""
        if not self._with_ids:
            return []
        return [self._chunk([self._choice(output, Piece()) | {"prompt_token_ids": objects.prompt_token_ids(output)}])]

    def _choice(self, output: Output, piece: Piece) -> Json:
        logprobs = None
        if self._with_logprobs and piece.has_logprobs:
            logprobs = objects.completion_logprobs(piece.logprobs, self._offsets[output.index], piece.first_piece)
        choice: Json = {
            "index": output.index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": objects.finish_reason(output) if piece.finished else None,
        }
        return choice | {"token_ids": list(piece.token_ids)} if self._with_ids else choice

    def _whole_choice(self, index: int, output: Output) -> Json:
        logprobs = None
        if self._with_logprobs:
            tokens = [*output.prompt_logprobs, *output.logprobs]
            logprobs = objects.completion_logprobs(tokens, objects.TextOffsets(), output.first_piece)
        choice: Json = {
            "index": index,
            "text": output.prompt_text + "".join(output.text),
            "logprobs": logprobs,
            "finish_reason": objects.finish_reason(output),
            "stop_reason": objects.stop_reason(output),
        }
        return choice | self._ids(output)

    def _ids(self, output: Output) -> Json:
        if not self._with_ids:
            return {}
        return {"prompt_token_ids": objects.prompt_token_ids(output), "token_ids": output.token_ids}


def best_of(outputs: Sequence[Output], num_best: int) -> list[Output]:
    """Per prompt the outputs with the highest log-probability per token, best first."""
    groups: dict[int, list[Output]] = defaultdict(list)
    for output in outputs:
        groups[output.prompt_index].append(output)
    return [one for group in groups.values() for one in sorted(group, key=_score, reverse=True)[:num_best]]


def _score(output: Output) -> float:
    logprobs = [objects.finite(token.logprob) for token in output.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else objects.LOWEST_LOGPROB
