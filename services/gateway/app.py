"""The HTTP application: which path leads where, and errors outside any endpoint. Owns routes; decides nothing else.

A further dialect adds its routes here and is otherwise a package of its own beside `openai`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from meshfire.errors import MeshfireError
from meshfire.store.database import Database
from meshfire.store.files import Files
from meshfire.telemetry.setup import Telemetry
from services.gateway import sse
from services.gateway.access.door import Door
from services.gateway.config import GatewaySettings
from services.gateway.dialect import Dialect
from services.gateway.endpoint import GenerateEndpoint, Limits
from services.gateway.errors import HttpError, as_http
from services.gateway.health import Health
from services.gateway.jobs.client import JobClient
from services.gateway.observe import Observer
from services.gateway.openai import models
from services.gateway.openai.base import OpenAiDialect
from services.gateway.openai.batch_outputs import BatchOutputs
from services.gateway.openai.batches import BatchesApi
from services.gateway.openai.chat import ChatDialect
from services.gateway.openai.completions import CompletionDialect
from services.gateway.openai.files import FilesApi
from services.gateway.routers import Routers

_STATUS_WORDS = {404: "not_found", 405: "method_not_allowed"}


def create_app(
    settings: GatewaySettings, routers: Routers, door: Door, database: Database | None, telemetry: Telemetry
) -> Starlette:
    """All routes; those of files and batches where there is a store. Errors that reach the application are written in
    OpenAI's shape."""
    observer = Observer(telemetry.tracer, telemetry.meter)
    limits = Limits(settings.max_body_bytes, settings.request_timeout_s)

    def generating(path: str, dialect: Dialect) -> Route:
        return Route(path, GenerateEndpoint(path, dialect, routers, door, observer, limits), methods=["POST"])

    chat, completions = ChatDialect(settings.max_outputs), CompletionDialect(settings.max_outputs)
    batched: dict[str, Dialect] = {"/v1/chat/completions": chat, "/v1/completions": completions}
    pages = Pages(routers, door, telemetry, settings.probe_timeout_s)
    app = Starlette(
        routes=[
            generating("/v1/chat/completions", chat),
            generating("/v1/completions", completions),
            *(_batch_routes(settings, routers, door, database, batched) if database is not None else ()),
            Route("/v1/models", pages.models),
            Route("/v1/models/{name:path}", pages.model),
            Route("/healthz", pages.healthz),
            Route("/metrics", pages.metrics),
        ],
        exception_handlers={
            HttpError: _explained,
            MeshfireError: _explained,
            HTTPException: _unrouted,
            Exception: _explained,
        },
    )
    app.router.redirect_slashes = False
    return app


def _batch_routes(
    settings: GatewaySettings, routers: Routers, door: Door, database: Database, dialects: Mapping[str, Dialect]
) -> list[Route]:
    files = Files(database, retention_s=settings.file_retention_s)
    jobs = JobClient(routers, settings.job_timeout_s)
    files_api = FilesApi(files, BatchOutputs(jobs, dialects), door)
    batches_api = BatchesApi(files, jobs, dialects, door)
    return [
        Route("/v1/files", files_api.files, methods=["GET", "POST"]),
        Route("/v1/files/{file_id}", files_api.file, methods=["GET", "DELETE"]),
        Route("/v1/files/{file_id}/content", files_api.content),
        Route("/v1/batches", batches_api.batches, methods=["GET", "POST"]),
        Route("/v1/batches/{batch_id}", batches_api.batch),
        Route("/v1/batches/{batch_id}/cancel", batches_api.cancel, methods=["POST"]),
    ]


class Pages:
    """What can be asked without generating."""

    def __init__(self, routers: Routers, door: Door, telemetry: Telemetry, probe_timeout_s: float) -> None:
        self._routers = routers
        self._door = door
        self._telemetry = telemetry
        self._probe_timeout_s = probe_timeout_s
        self._health = Health(routers, probe_timeout_s)
        self._started = int(time.time())

    async def models(self, request: Request) -> Response:
        await self._door.enter(request.headers)
        served = await self._routers.list_models(self._probe_timeout_s)
        return _json(200, models.listing(served, self._started))

    async def model(self, request: Request) -> Response:
        await self._door.enter(request.headers)
        served = await self._routers.list_models(self._probe_timeout_s)
        return _json(200, models.single(served, request.path_params["name"], self._started))

    async def healthz(self, request: Request) -> Response:
        report = await self._health.check()
        return _json(200 if report["status"] == "ok" else 503, report)

    async def metrics(self, request: Request) -> Response:
        return Response(self._telemetry.prometheus_text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _json(status: int, body: dict[str, object], headers: dict[str, str] | None = None) -> Response:
    return Response(sse.to_json(body), status, headers, media_type="application/json")


def _error(error: HttpError) -> Response:
    dialect = OpenAiDialect()
    explained = dialect.explain(error)
    return _json(explained.status, dialect.error_body(explained), explained.headers)


async def _explained(request: Request, error: Exception) -> Response:
    return _error(as_http(error))


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # it is registered for this type only
    what = f"{request.method} {request.url.path}: {error.detail.lower()}"
    code = _STATUS_WORDS.get(error.status_code, "invalid_request")
    return _error(HttpError(error.status_code, what, code=code, headers=error.headers))
