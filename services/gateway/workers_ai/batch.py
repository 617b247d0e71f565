"""Workers AI's batches: `requests` in, a request id out; the same path tells what became of it.

An item has the model's own input shape and, if it likes, an `external_reference`. The answer's items are in order;
`id` is an item's index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import QueryParams
from starlette.types import Scope

from meshfire.api.router.v1 import job_service_pb2 as pb
from meshfire.errors import NotFound
from services.gateway import sse
from services.gateway.access.door import Door
from services.gateway.access.visitor import Visitor
from services.gateway.dialect import Dialect, Json
from services.gateway.errors import HttpError
from services.gateway.jobs.client import JobClient
from services.gateway.jobs.items import answer_of, item_of
from services.gateway.names import ModelNames
from services.gateway.workers_ai.envelope import enveloped

LABEL = b"workers_ai.batch"
MAX_REFERENCE_CHARS = 512
_STATUS = {pb.JOB_STATUS_QUEUED: "queued", pb.JOB_STATUS_RUNNING: "running"}
_UNFINISHED = {
    pb.JOB_STATUS_CANCELLED: "the batch was cancelled before this request ran",
    pb.JOB_STATUS_EXPIRED: "the batch expired before this request ran",
}


class Batches:
    """`answer` is asked before a body is served online. Without a `jobs` client (no store) batches are refused."""

    def __init__(self, jobs: JobClient | None, names: ModelNames, door: Door) -> None:
        self._jobs = jobs
        self._names = names
        self._door = door

    async def answer(self, scope: Scope, dialect: Dialect, body: object, visitor: Visitor) -> Json | None:
        """None if the body is no business of batches. Raises HttpError naming the field."""
        query = QueryParams(scope.get("query_string", b""))
        model = unquote(scope.get("path_params", {}).get("model", ""))
        queued = query.get("queueRequest", "").lower() == "true" or query.get("queuerequest", "").lower() == "true"
        has = body.keys() if isinstance(body, dict) else frozenset[str]()
        if not queued and not has & {"requests", "request_id"}:
            return None
        if self._jobs is None:
            raise HttpError(400, "batches need a store: set store_url", "queueRequest", "unsupported_parameter")
        if not isinstance(body, dict):
            raise HttpError(400, "the body must be a JSON object", code="invalid_type")
        if "request_id" in body:
            return await self._poll(self._jobs, dialect, body["request_id"], visitor)
        return await self._submit(self._jobs, dialect, model, _requests_in(body), visitor)

    async def _submit(
        self, jobs: JobClient, dialect: Dialect, model: str, requests: Sequence[Any], visitor: Visitor
    ) -> Json:
        items = [_item(number, one, dialect, model, visitor) for number, one in enumerate(requests)]
        served = await self._names.resolve(model)
        for item in items:
            for call in item.calls:
                call.request.model = served
        async with self._door.admitted(visitor, served):
            job = await jobs.submit(visitor, pb.SubmitJobRequest(model=served, items=items, label=LABEL))
        return enveloped({"status": "queued", "request_id": job.job_id, "model": model})

    async def _poll(self, jobs: JobClient, dialect: Dialect, job_id: object, visitor: Visitor) -> Json:
        if not isinstance(job_id, str) or not job_id:
            raise HttpError(400, "request_id must be a string", "request_id", "invalid_type")
        job = await jobs.job(visitor, job_id)
        if job.label != LABEL:
            raise NotFound(f"there is no request {job_id!r}", field="request_id")
        if job.status in _STATUS:
            return enveloped({"status": _STATUS[job.status], "request_id": job.job_id, "model": job.model})
        results = await jobs.results(visitor, job_id)
        told = [_told(job, result, dialect) for result in results]
        return enveloped({"responses": told, "usage": _usage(told)})


def _requests_in(body: Mapping[str, Any]) -> Sequence[Any]:
    requests = body.get("requests", [body])
    if not isinstance(requests, list) or not requests:
        raise HttpError(400, "requests must be a list of at least one request", "requests", "invalid_type")
    extra = [key for key in body if key != "requests"] if "requests" in body else []
    if extra:
        raise HttpError(400, f"{extra[0][:100]}: not known beside requests", extra[0][:100], "unknown_parameter")
    return requests


def _item(number: int, one: Any, dialect: Dialect, model: str, visitor: Visitor) -> pb.JobItem:
    if not isinstance(one, dict):
        raise HttpError(400, f"requests[{number}] must be an object", f"requests[{number}]", "invalid_type")
    reference = one.get("external_reference")
    if reference is not None and (not isinstance(reference, str) or len(reference) > MAX_REFERENCE_CHARS):
        param = f"requests[{number}].external_reference"
        raise HttpError(400, f"{param} must be a text of at most {MAX_REFERENCE_CHARS} characters", param)
    asked = {key: value for key, value in one.items() if key not in ("external_reference", "stream")}
    return item_of(reference or "", sse.to_json(asked), asked, dialect, model, visitor)


def _told(job: pb.Job, result: pb.JobItemResult, dialect: Dialect) -> Json:
    head: Json = {"id": result.position}
    tail = {"external_reference": result.reference} if result.reference else {}
    answer = answer_of(result, dialect, job.created_at_ms // 1000)
    if answer is None:
        message = _UNFINISHED.get(job.status, "this request was not run")
        return head | {"success": False, "errors": [{"code": 5001, "message": message}]} | tail
    if answer.status != 200:
        return head | {"success": False, "errors": answer.body["errors"]} | tail
    return head | {"result": answer.body["result"], "success": True} | tail


def _usage(told: Sequence[Json]) -> Json:
    names = ("prompt_tokens", "completion_tokens", "total_tokens", "neurons")
    usages = [one["result"]["usage"] for one in told if one["success"]]
    return {name: sum(usage.get(name, 0) for usage in usages) for name in names}
