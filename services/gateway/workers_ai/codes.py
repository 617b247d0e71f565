"""Error codes of Workers AI. One table from the gateway's words to them; pure.

Three codes share HTTP 429 and mean different things to a client: 3036 = not before 00:00 UTC, 3021 and 3040 = later.
Source: Cloudflare's documentation of Workers AI errors, and codes seen in public reports.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.errors import HttpError


@dataclass(frozen=True)
class Code:
    """A number, and the HTTP status that goes with it."""

    number: int
    status: int


AUTHENTICATION = Code(10000, 401)
NOT_ALLOWED = Code(3041, 403)
NO_SUCH_MODEL = Code(5007, 400)
BAD_INPUT = Code(5006, 400)
NO_ROUTE = Code(7003, 404)
TOO_LARGE = Code(3006, 413)
TIMEOUT = Code(3007, 408)
ABORTED = Code(3008, 408)
RATE_LIMITED = Code(3021, 429)
ACCOUNT_LIMITED = Code(3036, 429)
OUT_OF_CAPACITY = Code(3040, 429)
INTERNAL = Code(5001, 500)
NO_SUCH_JOB = Code(7003, 404)
INCOMPLETE = Code(3003, 400)
UNAVAILABLE = Code(3040, 503)

_BY_WORD = {
    "invalid_api_key": AUTHENTICATION,
    "account_not_allowed": NOT_ALLOWED,
    "unknown_model": NO_SUCH_MODEL,
    "model_not_found": NO_SUCH_MODEL,
    "rate_limited": RATE_LIMITED,
    "concurrency_limited": RATE_LIMITED,
    "account_limited": ACCOUNT_LIMITED,
    "queue_full": OUT_OF_CAPACITY,
    "out_of_capacity": OUT_OF_CAPACITY,
    "exhausted": OUT_OF_CAPACITY,
    "no_free_blocks": OUT_OF_CAPACITY,
    "request_too_large": TOO_LARGE,
    "request_timeout": TIMEOUT,
    "deadline_exceeded": TIMEOUT,
    "cancelled": ABORTED,
    "not_found": NO_ROUTE,
    "method_not_allowed": Code(7003, 405),
    "invalid_json": INCOMPLETE,
    "unsupported_media_type": Code(3003, 415),
}
_BY_STATUS = {401: AUTHENTICATION, 403: NOT_ALLOWED, 404: NO_ROUTE, 408: TIMEOUT, 413: TOO_LARGE}


def code_of(error: HttpError) -> Code:
    """By the error's word, else by its status."""
    known = _BY_WORD.get(error.code or "")
    if known is not None:
        return known
    if error.status in _BY_STATUS:
        return _BY_STATUS[error.status]
    if error.status == 429:
        return OUT_OF_CAPACITY
    if error.status in (503, 504):
        return UNAVAILABLE if error.status == 503 else TIMEOUT
    return BAD_INPUT if error.status < 500 else INTERNAL


def text_of(error: HttpError) -> str:
    """The message as clients of the hosted service look for it."""
    code = code_of(error)
    if code is OUT_OF_CAPACITY:
        return f"AiError: Capacity temporarily exceeded, please try again. ({error.message})"
    if code is RATE_LIMITED:
        return f"AiError: rate limiting: inference request per min rate reached ({error.message})"
    if code is NO_SUCH_MODEL:
        return f"AiError: No such model or task: {error.message}"
    if code is BAD_INPUT:
        return f"AiError: Bad input: {error.message}"
    return f"AiError: {error.message}" if code is not AUTHENTICATION else f"Authentication error: {error.message}"
