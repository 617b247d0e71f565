"""`/v1/batches`: files of requests as jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from meshfire.api.router.v1 import job_service_pb2 as pb
from meshfire.errors import NotFound
from meshfire.store.files import Files
from services.gateway import sse
from services.gateway.access.door import Door
from services.gateway.access.visitor import Visitor
from services.gateway.dialect import Dialect, Json
from services.gateway.errors import HttpError
from services.gateway.exchange import read_json
from services.gateway.jobs.client import JobClient
from services.gateway.names import ModelNames
from services.gateway.openai import batch_lines
from services.gateway.openai.base import as_request
from services.gateway.openai.batch_objects import BatchRequest, Label, batch, label_of

_ID_PREFIX = "batch_"
_MAX_BODY_BYTES = 64 * 1024
_BODY_TIMEOUT_S = 30.0
_PAGE = 20
_MAX_PAGE = 100


class BatchesApi:
    """Endpoints. `dialects` by the endpoint that a batch names."""

    def __init__(
        self, files: Files, jobs: JobClient, dialects: Mapping[str, Dialect], names: ModelNames, door: Door
    ) -> None:
        self._files = files
        self._names = names
        self._jobs = jobs
        self._dialects = dialects
        self._door = door

    async def batches(self, request: Request) -> Response:
        """GET lists, POST submits."""
        visitor = await self._door.enter(request.headers)
        if request.method == "GET":
            return await self._list(request, visitor)
        body = await read_json(request.headers, request.receive, max_bytes=_MAX_BODY_BYTES, timeout_s=_BODY_TIMEOUT_S)
        asked = as_request(BatchRequest, body)
        dialect = self._dialects.get(asked.endpoint)
        if dialect is None:
            what = f"endpoint is {asked.endpoint!r}, expected one of {', '.join(self._dialects)}"
            raise HttpError(400, what, "endpoint", "invalid_value")
        content = await self._files.content(visitor.account_id, asked.input_file_id)
        # Ten megabytes of lines take a second to validate.
        parsed = await asyncio.to_thread(batch_lines.parse, content, asked.endpoint, dialect, visitor)
        label = Label(
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            metadata=asked.metadata,
        )
        served = await self._names.resolve(parsed.model)
        for item in parsed.items:
            for call in item.calls:
                call.request.model = served
        submission = pb.SubmitJobRequest(
            model=served, items=parsed.items, label=label.to_bytes(), completion_window_s=asked.window_s
        )
        async with self._door.admitted(visitor, served):
            job = await self._jobs.submit(visitor, submission)
        return _json(batch(job, label))

    async def batch(self, request: Request) -> Response:
        """GET tells."""
        visitor = await self._door.enter(request.headers)
        return _json(_batch(await self._jobs.job(visitor, _job_id(request)), request))

    async def cancel(self, request: Request) -> Response:
        """POST ends."""
        visitor = await self._door.enter(request.headers)
        job = await self._jobs.job(visitor, _job_id(request))
        _batch(job, request)  # a job of another dialect is not to be cancelled here
        return _json(_batch(await self._jobs.cancel(visitor, job.job_id), request))

    async def _list(self, request: Request, visitor: Visitor) -> Response:
        limit = _limit(request.query_params.get("limit"))
        after = request.query_params.get("after", "").removeprefix(_ID_PREFIX)
        page = await self._jobs.list_jobs(visitor, after, limit)
        data = [batch(job, label) for job in page.jobs if (label := label_of(job)) is not None]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return _json({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": page.has_more})


def _job_id(request: Request) -> str:
    return str(request.path_params["batch_id"]).removeprefix(_ID_PREFIX)


def _batch(job: pb.Job, request: Request) -> Json:
    label = label_of(job)
    if label is None:
        raise NotFound(f"there is no batch {request.path_params['batch_id']!r}", field="batch_id")
    return batch(job, label)


def _limit(asked: str | None) -> int:
    if asked is None:
        return _PAGE
    if not asked.isdigit() or not 1 <= int(asked) <= _MAX_PAGE:
        raise HttpError(400, f"limit is {asked[:20]!r}, expected 1 to {_MAX_PAGE}", "limit", "invalid_value")
    return int(asked)


def _json(body: Json) -> Response:
    return Response(sse.to_json(body), media_type="application/json")
