"""`ai/run/{model}`: the dialect of one model's path, whichever family it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from services.gateway.dialect import Call, Dialect, Job, Json, Renderer
from services.gateway.errors import HttpError
from services.gateway.outputs import Output, Piece
from services.gateway.workers_ai import chat, classic, envelope
from services.gateway.workers_ai.families import Family, family_of

#: members of a body without a model in the path
_MODEL, _INPUT = "model", "input"


class RunDialect:
    """`families` of models whose names do not tell. `model` = the path's; "" = the body names it beside `input`."""

    def __init__(self, max_outputs: int, families: Mapping[str, Family], model: str = "") -> None:
        self._max_outputs = max_outputs
        self._families = families
        self._model = model

    def at(self, path: Mapping[str, str]) -> Dialect:
        """For a request's path, whose model may be percent-encoded once more."""
        return RunDialect(self._max_outputs, self._families, unquote(path.get("model", "")))

    def parse(self, body: object) -> Job:
        model, asked = self._asked(body)
        if family_of(model, self._families) == "chat":
            return _Enveloped(chat.parse(model, asked, self._max_outputs))
        return _Enveloped(classic.parse(model, asked))

    def explain(self, error: HttpError) -> HttpError:
        return envelope.as_answered(error)

    def error_body(self, error: HttpError) -> Json:
        return envelope.failed(error)

    def _asked(self, body: object) -> tuple[str, object]:
        if self._model:
            return self._model, body
        if not isinstance(body, dict) or not isinstance(body.get(_MODEL), str) or not body[_MODEL]:
            raise HttpError(400, "model is missing", "model", "missing_required_parameter")
        if _INPUT in body:
            return body[_MODEL], body[_INPUT]
        return body[_MODEL], {key: value for key, value in body.items() if key != _MODEL}


@dataclass(frozen=True)
class _Enveloped:
    """A job whose whole answer comes in the envelope. Frames of a stream come bare."""

    job: Job

    @property
    def model(self) -> str:
        return self.job.model

    @property
    def stream(self) -> bool:
        return self.job.stream

    @property
    def calls(self) -> Sequence[Call]:
        return self.job.calls

    def renderer(self, request_id: str, created: int) -> Renderer:
        return _EnvelopedRenderer(self.job.renderer(request_id, created))


@dataclass(frozen=True)
class _EnvelopedRenderer:
    inner: Renderer

    def chunks(self, output: Output, piece: Piece) -> list[Json]:
        return self.inner.chunks(output, piece)

    def closing(self, outputs: Sequence[Output]) -> list[Json]:
        return self.inner.closing(outputs)

    def whole(self, outputs: Sequence[Output]) -> Json:
        return envelope.enveloped(self.inner.whole(outputs))
