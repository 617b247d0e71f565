"""The HTTP application: which path leads where, and errors outside any endpoint. Owns routes; decides nothing else.

A further dialect adds its routes here and is otherwise a package of its own beside `openai`.
"""

from __future__ import annotations

import time

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
from services.gateway.endpoint import GenerateEndpoint, Instead, Limits
from services.gateway.errors import HttpError, as_http
from services.gateway.health import Health
from services.gateway.jobs.client import JobClient
from services.gateway.names import ModelNames
from services.gateway.observe import Observer
from services.gateway.openai import models
from services.gateway.openai.base import OpenAiDialect
from services.gateway.openai.batch_outputs import BatchOutputs
from services.gateway.openai.batches import BatchesApi
from services.gateway.openai.chat import ChatDialect
from services.gateway.openai.completions import CompletionDialect
from services.gateway.openai.files import FilesApi
from services.gateway.routers import Routers
from services.gateway.workers_ai import envelope
from services.gateway.workers_ai.batch import Batches
from services.gateway.workers_ai.catalogue import Catalogue
from services.gateway.workers_ai.openai_paths import UnderAccount
from services.gateway.workers_ai.run import RunDialect

_STATUS_WORDS = {404: "not_found", 405: "method_not_allowed"}


def create_app(
    settings: GatewaySettings, routers: Routers, door: Door, database: Database | None, telemetry: Telemetry
) -> Starlette:
    """All routes; those of files and batches where there is a store. Errors that reach the application are written in
    OpenAI's shape."""
    observer = Observer(telemetry.tracer, telemetry.meter)
    limits = Limits(settings.max_body_bytes, settings.request_timeout_s)
    names = ModelNames(routers, settings.model_aliases, settings.probe_timeout_s)
    jobs = JobClient(routers, settings.job_timeout_s) if database is not None else None

    def generating(path: str, dialect: Dialect, instead: Instead | None = None) -> Route:
        endpoint = GenerateEndpoint(path, dialect, routers, names, door, observer, limits, instead)
        return Route(path, endpoint, methods=["POST"])

    chat, completions = ChatDialect(settings.max_outputs), CompletionDialect(settings.max_outputs)
    run = RunDialect(settings.max_outputs, settings.model_families)
    native = Batches(jobs, names, door).answer
    pages = Pages(routers, door, telemetry, settings.probe_timeout_s)
    catalogue = Catalogue(routers, door, settings.model_families, settings.probe_timeout_s)
    account = "/client/v4/accounts/{account_id}/ai"
    routes = [
        generating("/v1/chat/completions", chat),
        generating("/v1/completions", completions),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        generating(f"{account}/v1/chat/completions", UnderAccount(chat)),
        generating(f"{account}/v1/completions", UnderAccount(completions)),
        Route(f"{account}/v1/models", pages.models),
        Route(f"{account}/models/search", catalogue.search),
        Route(f"{account}/models/schema", catalogue.schema),
        generating(f"{account}/run", run),
        generating(f"{account}/run/{{model:path}}", run, native),
        Route("/healthz", pages.healthz),
        Route("/metrics", pages.metrics),
    ]
    if database is not None and jobs is not None:
        files = Files(database, retention_s=settings.file_retention_s)
        batched: dict[str, Dialect] = {"/v1/chat/completions": chat, "/v1/completions": completions}
        routes += _batch_routes(
            FilesApi(files, BatchOutputs(jobs, batched), door), BatchesApi(files, jobs, batched, names, door)
        )
    app = Starlette(
        routes=routes,
        exception_handlers={
            HttpError: _explained,
            MeshfireError: _explained,
            HTTPException: _unrouted,
            Exception: _explained,
        },
    )
    app.router.redirect_slashes = False
    return app


def _batch_routes(files: FilesApi, batches: BatchesApi) -> list[Route]:
    return [
        Route("/v1/files", files.files, methods=["GET", "POST"]),
        Route("/v1/files/{file_id}", files.file, methods=["GET", "DELETE"]),
        Route("/v1/files/{file_id}/content", files.content),
        Route("/v1/batches", batches.batches, methods=["GET", "POST"]),
        Route("/v1/batches/{batch_id}", batches.batch),
        Route("/v1/batches/{batch_id}/cancel", batches.cancel, methods=["POST"]),
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
        await self._door.enter(request.headers, request.path_params.get("account_id"))
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


def _error(request: Request, error: HttpError) -> Response:
    """In the shape of the path's dialect."""
    if request.url.path.startswith("/client/"):
        native = envelope.as_answered(error)
        return _json(native.status, envelope.failed(native), native.headers)
    dialect = OpenAiDialect()
    explained = dialect.explain(error)
    return _json(explained.status, dialect.error_body(explained), explained.headers)


async def _explained(request: Request, error: Exception) -> Response:
    return _error(request, as_http(error))


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # it is registered for this type only
    what = f"{request.method} {request.url.path}: {error.detail.lower()}"
    code = _STATUS_WORDS.get(error.status_code, "invalid_request")
    return _error(request, HttpError(error.status_code, what, code=code, headers=error.headers))
