"""Lines of a batch's input and output files. Pure.

A line that is wrong in itself fails alone and the rest run; two lines of one `custom_id` make the whole file ambiguous,
which is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_core import from_json

from meshfire.api.router.v1 import job_service_pb2 as pb
from services.gateway import sse
from services.gateway.access.visitor import Visitor
from services.gateway.dialect import Dialect, Json
from services.gateway.errors import HttpError
from services.gateway.jobs.items import answer_of, item_of, refused
from services.gateway.openai import errors
from services.gateway.openai.strict import Strict

MAX_LINES = 50_000
_UNFINISHED = {
    pb.JOB_ITEM_STATUS_CANCELLED: ("batch_cancelled", "the batch was cancelled before this request ran"),
    pb.JOB_ITEM_STATUS_QUEUED: ("batch_expired", "this request has not run yet"),
    pb.JOB_ITEM_STATUS_RUNNING: ("batch_expired", "this request has not run yet"),
}


class _Line(Strict):
    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Parsed:
    """Items of a file, and the model that they use."""

    model: str
    items: Sequence[pb.JobItem]


def parse(content: bytes, endpoint: str, dialect: Dialect, visitor: Visitor) -> Parsed:
    """A file's items. Raises HttpError for a file that has none, too many, or two of one `custom_id`."""
    lines = [line for line in content.split(b"\n") if line.strip()]
    if not 0 < len(lines) <= MAX_LINES:
        raise HttpError(400, f"the input file has {len(lines)} lines, expected 1 to {MAX_LINES}", "input_file_id")
    read = [_read(number, line, endpoint) for number, line in enumerate(lines, start=1)]
    _require_unique([one.custom_id if isinstance(one, _Line) else "" for one in read])
    model = next((str(one.body.get("model", "")) for one in read if isinstance(one, _Line)), "")
    if not model:
        raise HttpError(400, "no line of the input file names a model", "input_file_id", "invalid_value")
    items = []
    for number, (line, one) in enumerate(zip(lines, read, strict=True), start=1):
        if isinstance(one, _Line):
            items.append(item_of(one.custom_id, sse.to_json(one.body), one.body, dialect, model, visitor))
        else:
            items.append(refused(_custom_id(line) or f"line-{number}", b"", one))
    return Parsed(model, items)


def _read(number: int, line: bytes, endpoint: str) -> _Line | HttpError:
    try:
        parsed = _Line.model_validate(from_json(line, allow_inf_nan=False))
    except ValidationError as error:
        wrong = errors.from_validation(error)
        return HttpError(400, f"line {number}: {wrong.message}", wrong.param, wrong.code)
    except ValueError as error:
        return HttpError(400, f"line {number} is not valid JSON: {error}", None, "invalid_json")
    if parsed.url != endpoint:
        return HttpError(400, f"line {number}: url is {parsed.url!r}, the batch's {endpoint!r}", "url", "invalid_value")
    if parsed.body.get("stream"):
        return HttpError(400, f"line {number}: a batch does not stream", "body.stream", "invalid_value")
    return parsed


def _custom_id(line: bytes) -> str:
    """Of a line that is wrong otherwise, if it can be told."""
    try:
        raw = from_json(line)
    except ValueError:
        return ""
    found = raw.get("custom_id") if isinstance(raw, dict) else None
    return found if isinstance(found, str) and 0 < len(found) <= 512 else ""


def _require_unique(custom_ids: Sequence[str]) -> None:
    first: dict[str, int] = {}
    for number, one in enumerate(custom_ids, start=1):
        if one and first.setdefault(one, number) != number:
            what = f"custom_id {one!r} is that of line {first[one]} and of line {number}"
            raise HttpError(400, what[:300], "input_file_id", "duplicate_custom_id")


def output_file(job: pb.Job, results: Sequence[pb.JobItemResult], dialect: Dialect, *, errors: bool) -> bytes:
    """JSON lines of the items that succeeded, or of those that did not."""
    lines = []
    for result in results:
        if (result.status == pb.JOB_ITEM_STATUS_SUCCEEDED) is errors:
            continue
        lines.append(sse.to_json(_output_line(job, result, dialect)))
    return b"".join(line + b"\n" for line in lines)


def _output_line(job: pb.Job, result: pb.JobItemResult, dialect: Dialect) -> Json:
    head: Json = {"id": f"batch_req_{job.job_id}-{result.position}", "custom_id": result.reference}
    answer = answer_of(result, dialect, job.created_at_ms // 1000)
    if answer is None:
        code, message = _UNFINISHED.get(result.status, ("batch_expired", "this request was not run"))
        return head | {"response": None, "error": {"code": code, "message": message}}
    response: Mapping[str, Any] = {
        "status_code": answer.status,
        "request_id": answer.request_id or head["id"],
        "body": answer.body,
    }
    return head | {"response": response, "error": None}
