"""The envelope of Cloudflare's API around results and errors. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from services.gateway.dialect import Json
from services.gateway.errors import HttpError
from services.gateway.openai import errors as openai_errors
from services.gateway.workers_ai.codes import code_of, text_of


def enveloped(result: object, **more: object) -> Json:
    """A result. `more` are members beside it, such as `result_info`."""
    return {"result": result, "success": True, "errors": [], "messages": [], **more}


def failed(error: HttpError) -> Json:
    """An error; `error` beside `errors` is what OpenAI's SDKs read."""
    told: Mapping[str, object] = openai_errors.body_of(error)["error"]
    return {
        "result": None,
        "success": False,
        "errors": [{"code": code_of(error).number, "message": text_of(error)}],
        "messages": [],
        "error": told,
    }


def as_answered(error: HttpError) -> HttpError:
    """With the status that Workers AI answers it with."""
    words = openai_errors.in_callers_words(error)
    return HttpError(code_of(error).status, words.message, words.param, error.code, error.headers)
