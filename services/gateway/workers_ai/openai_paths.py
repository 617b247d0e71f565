"""OpenAI's endpoints below an account's path: bare answers, errors in Cloudflare's envelope."""

from __future__ import annotations

from collections.abc import Mapping

from services.gateway.dialect import Dialect, Job, Json
from services.gateway.errors import HttpError
from services.gateway.workers_ai import envelope


class UnderAccount:
    """An OpenAI dialect with the envelope's errors."""

    def __init__(self, inner: Dialect) -> None:
        self._inner = inner

    def at(self, path: Mapping[str, str]) -> Dialect:
        return self

    def parse(self, body: object) -> Job:
        return self._inner.parse(body)

    def explain(self, error: HttpError) -> HttpError:
        return envelope.as_answered(error)

    def error_body(self, error: HttpError) -> Json:
        return envelope.failed(error)
