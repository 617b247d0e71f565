"""Items from request bodies, and answers from their results: with the very dialect that serves them online."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic_core import from_json

from meshfire.api.router.v1 import job_service_pb2 as pb
from meshfire.errors import all_errors
from services.gateway.access.visitor import Visitor
from services.gateway.dialect import Dialect, Json
from services.gateway.errors import STATUS_OF, HttpError
from services.gateway.outputs import Output

#: of an item that the gateway refused, or whose reason is of a newer router
_DEFAULT_STATUS = 400


@dataclass(frozen=True)
class Answer:
    """What an online request would have been answered with."""

    status: int
    body: Json
    request_id: str = ""


def item_of(reference: str, raw: bytes, body: object, dialect: Dialect, model: str, visitor: Visitor) -> pb.JobItem:
    """An item of a job of `model`. What the dialect refuses becomes an item that has failed."""
    try:
        job = dialect.parse(body)
        if job.model != model:
            raise HttpError(400, f"model is {job.model!r}; all items of a job use one, here {model!r}", "model")
    except HttpError as error:
        return refused(reference, raw, dialect.explain(error))
    item = pb.JobItem(reference=reference, body=raw)
    for call in job.calls:
        call.request.cache_salt = visitor.cache_salt(call.request.cache_salt)
        item.calls.add(request=call.request, prompt_index=call.prompt_index)
    return item


def refused(reference: str, raw: bytes, error: HttpError) -> pb.JobItem:
    """An item that has failed before it was sent."""
    refusal = pb.JobError(reason=error.code or "invalid_value", message=error.message, field=error.param or "")
    return pb.JobItem(reference=reference, body=raw, refusal=refusal)


def answer_of(result: pb.JobItemResult, dialect: Dialect, created: int) -> Answer | None:
    """The answer to an item; None while it has no result."""
    if not result.HasField("outcome"):
        return None
    if result.outcome.HasField("error"):
        error = dialect.explain(_http_error(result.outcome.error))
        return Answer(error.status, dialect.error_body(error))
    outputs = _outputs(result)
    started = outputs[0].started
    request_id = "" if started is None else started.request_id
    renderer = dialect.parse(from_json(result.body)).renderer(request_id, created)
    return Answer(200, renderer.whole(outputs), request_id)


def _outputs(result: pb.JobItemResult) -> Sequence[Output]:
    outputs = []
    for index, told in enumerate(result.outcome.outputs):
        output = Output(index, result.prompt_indices[index])
        for message in told.messages:
            output.add(message)
        outputs.append(output)
    return outputs


def _http_error(error: pb.JobError) -> HttpError:
    kind = all_errors().get(error.reason)
    status = _DEFAULT_STATUS if kind is None else STATUS_OF.get(kind.code, 500)
    return HttpError(status, error.message, error.field or None, error.reason.lower())
