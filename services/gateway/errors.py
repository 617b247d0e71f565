"""What went wrong, as HTTP sees it: a status and the words, before a dialect gives them its shape.

Owns the one table from error codes to statuses. Knows no dialect.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from meshfire.errors import InternalError, MeshfireError

log = logging.getLogger(__name__)

#: gRPC status name → HTTP status. FAILED_PRECONDITION is 400 as in google.rpc, not 409: OpenAI's SDKs repeat a 409 by
#: themselves, and repeating a refused request unchanged is useless.
STATUS_OF: Mapping[str, int] = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "DATA_LOSS": 503,
    "CANCELLED": 503,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
#: What 429 and 503 advise when the error does not say.
DEFAULT_RETRY_AFTER_S = 1.0


class HttpError(Exception):
    """An answer that is an error. `param` is the field's path in the caller's own body, or the header's name."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class ClientGone(Exception):
    """The client closed the connection before its answer was complete. Nobody is left to be told."""


def as_http(error: Exception) -> HttpError:
    """Any exception as an answer. One that nobody expected is logged in full and told in no words."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, MeshfireError):
        return from_meshfire(error)
    log.error("request failed", exc_info=error)
    return from_meshfire(InternalError(str(error)))


def from_meshfire(error: MeshfireError) -> HttpError:
    """The HTTP form; `param` is still the router's path and the dialect translates it. INTERNAL loses its words."""
    status = STATUS_OF.get(error.code, 500)
    if status == 500:
        return HttpError(500, "internal error; the request id leads to the log", code="internal_error")
    return HttpError(status, error.message, error.field, error.reason.lower(), _headers(status, error))


def _headers(status: int, error: MeshfireError) -> dict[str, str]:
    if status not in (429, 503):
        return {}
    wait_s = DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
    return {"retry-after": str(max(1, math.ceil(wait_s)))}
